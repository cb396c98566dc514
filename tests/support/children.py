"""Kills everything that the tests started when their process exits, however it exits.

Every process below the tests inherits a mark in its environment. A watcher that isn't their child
waits for the end of the tests and then kills every process with the mark, also a training that was
started in its own session, or by another process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "EVENER_TESTS"
ROUNDS, PAUSE_SECONDS = 100, 0.05  # a process may be starting another one while it is killed


def end_with_this_process() -> None:
    """Mark all processes started from now on, and have them killed when this one exits."""
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, check=True
    )
    os.environ[MARK] = ",".join([*filter(None, [os.environ.get(MARK)]), mark])


def find_marked(mark: str) -> Iterator[int]:
    """Yield the processes whose environment has the mark. Processes that have exited have none."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                yield int(folder.name)


def watch(pid: int, mark: str) -> None:
    """Wait until a process exits, then kill the processes with the mark."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    for _ in range(ROUNDS):
        found = list(find_marked(mark))
        if not found:
            break
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    if os.fork() == 0:  # the caller of this script continues; the watcher is nobody's child
        os.setsid()
        watch(int(sys.argv[1]), sys.argv[2])
