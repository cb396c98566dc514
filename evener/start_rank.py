"""Becomes a training script: `python -m evener.start_rank train.py ARGS`, on the device that evener launch has chosen.

It replaces itself by the script, so that nothing of evener is in the script's arguments, modules or tracebacks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

STARTS = "EVENER_STARTS"  # JSON: variables and cores of each process of this host, and the launcher's pid
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl.h


def main() -> None:
    """Take this process's part of the variable, and run the script in its place."""
    starts = json.loads(os.environ.pop(STARTS))
    own = starts[int(os.environ["LOCAL_RANK"]) if len(starts) > 1 else 0]
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)  # a launcher that is killed leaves no training behind
    if os.getppid() != own["launcher"]:  # also if it was killed before that
        sys.exit(1)
    _say_restart()
    if own["cores"]:
        os.sched_setaffinity(0, own["cores"])
    os.execve(sys.executable, [sys.executable, "-u", *sys.argv[1:]], {**os.environ, **own["variables"]})


def _say_restart() -> None:
    """After the end of a process of this host: over several hosts PyTorch's agents start all again by themselves."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if count and os.environ["LOCAL_RANK"] == "0":
        most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        words = f"a process of this host has ended; all start again, {count} of {most} times"
        print(f"evener: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
