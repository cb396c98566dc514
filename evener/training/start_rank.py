"""Start one rank: `python -m evener.training.start_rank` replaces itself with the script."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from .first_rank import RELEASE, STARTED_AS, describe_rank, wait_for_release

# JSON with the variables and cores of this host's processes, and the launcher's pid and folder
STARTS = "EVENER_STARTS"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl.h


def main() -> None:
    """Apply the settings of this process's rank, and execute the script or program."""
    # This process's entry in EVENER_STARTS sets environment variables, cores and output files. It
    # may also make ranks other than 0 wait until rank 0 releases them.
    starts = json.loads(os.environ.pop(STARTS))
    own = starts[int(os.environ["LOCAL_RANK"]) if len(starts) > 1 else 0]
    # if the launcher is killed, the training ends
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != own["launcher"]:  # the launcher was killed before the call above
        sys.exit(1)
    for stream, path in enumerate(own.get("output", ()), 1):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    rank = os.environ.get("RANK", "0")
    release = own.get("release", "")
    if release:
        wait_for_release(release, int(rank))
    if own["cores"] and not (release and rank == "0"):  # the first rank may start ranks of its own
        os.sched_setaffinity(0, own["cores"])
    variables = {**own["variables"], **_count_restarts(own["folder"])}
    variables |= {RELEASE: release, STARTED_AS: describe_rank()}
    start = [own["executable"]] if own.get("executable") else [sys.executable, "-u"]
    os.execve(start[0], [*start, *sys.argv[1:]], {**os.environ, **variables})


def _count_restarts(folder: str) -> dict[str, str]:
    """Count the restarts of training on all hosts, and print a message after a restart.

    Returns environment variables with the number of restarts, or {} if PyTorch's agent doesn't
    restart ranks.
    """
    # The agent counts only restarts that processes of its own host caused. Therefore each start is
    # also recorded in a file in `folder`.
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return {}
    own, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
    with open(f"{folder}/starts-{os.environ['LOCAL_RANK']}", "a+") as starts:
        starts.seek(0)
        before = starts.read().split()
        starts.write(f"{own} ")
    if before and os.environ["LOCAL_RANK"] == "0":
        where, times = (
            ("this", f", {own} of {most} times") if own != before[-1] else ("another", "")
        )
        words = f"a process of {where} host has ended; all start again{times}"
        print(f"evener: {words}", file=sys.stderr, flush=True)
    return {"TORCHELASTIC_RESTART_COUNT": str(len(before))}


if __name__ == "__main__":
    main()
