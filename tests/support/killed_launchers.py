"""Launchers that are killed at random moments.

Run as `python -m tests.support.killed_launchers FOLDER KILLS SEED SECONDS`. One process imports the
launcher, and each launcher is a fork of it, so that a moment of its start isn't mostly imports. Its
two ranks ignore SIGTERM, and each has started a process in its own session. Prints, as JSON, what
is left `SECONDS` after the last kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import msgspec

from evener.launch.guard import start_guard
from evener.launch.job import make_job
from evener.launch.restarts import run_job
from tests.support.launched_plan import plan

LONGEST_SECONDS = 0.4  # from its start to its end: its ranks run after 0.2 s
SCRIPT = """
import signal, subprocess, sys, time
if "helper" not in sys.argv:
    subprocess.Popen([sys.executable, __file__, "helper"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(300)
"""


def list_processes(folder: Path) -> list[str]:
    """Return the command lines that contain the folder's name, except this process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and entry.name != str(os.getpid()):
            found.append(f"{entry.name} {words}")
    return found


def launch(folder: Path) -> None:
    """Launch the plan in the folder. Never returns."""
    for stream in (1, 2):  # the reader of this output doesn't wait for ranks that are left
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        job = make_job(folder / "plan.toml", [str(folder / "train.py")], None, None)
        with start_guard("evener-launch-") as guard:
            run_job(msgspec.structs.replace(job, run=guard.run, folder=guard.folder), 0)
    finally:
        os._exit(0)


def main() -> None:
    """Start and kill launchers, one after the other."""
    folder, kills, draw, seconds = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        random.Random(sys.argv[3]),
        float(sys.argv[4]),
    )
    (folder / "train.py").write_text(SCRIPT)
    (folder / "temporary").mkdir()
    os.environ["TMPDIR"] = str(folder / "temporary")
    made = plan(["cpu-0-of-2", "cpu-1-of-2"], framework="tensorflow", engine="multiworker")
    made.save(folder / "plan.toml")
    for _ in range(kills):
        launcher = os.fork()
        if not launcher:
            launch(folder)
        time.sleep(draw.uniform(0.0, LONGEST_SECONDS))
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
    deadline = time.monotonic() + seconds
    left = find_left(folder)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = find_left(folder)
    print(json.dumps(left))


def find_left(folder: Path) -> list[str]:
    """Return the processes of a launch and its folders."""
    return [*list_processes(folder), *map(str, (folder / "temporary").glob("evener-*"))]


if __name__ == "__main__":
    main()
