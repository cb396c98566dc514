"""A process that cleans up after a launcher: `python watcher.py RUN PREFIX`.

The watcher creates the run's temporary folder and prints its path. Its standard input is a pipe
that closes when the launcher exits or is killed. The watcher then gives the run's remaining
processes a few seconds to exit, kills those that are left, and deletes the folder. After a
successful run, such processes may continue. The watcher imports no other module of evener, so it
starts quickly.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress

GRACE_SECONDS = 3.0  # time for ranks to exit after the kernel's SIGTERM
LONGEST_SECONDS = 10.0  # limit, as a process that hangs in a driver can't be killed
POLL_SECONDS = 0.2
SUCCEEDED = b"succeeded"
MARK = "EVENER_RUN"  # RUN in evener.training.launched; child processes of a rank inherit it


def main() -> None:
    """Create a temporary folder, print its path, and delete it once the launcher has ended.

    Unless the launcher reports success, the run's remaining processes are killed first.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the pipe ends this process
    run, prefix = sys.argv[1:]
    try:
        folder = tempfile.mkdtemp(prefix=prefix)
    except OSError as error:
        sys.exit(str(error))
    with suppress(OSError):  # the launcher may have ended already
        os.write(1, os.fsencode(folder))
        os.close(1)
    if sys.stdin.buffer.read() != SUCCEEDED:
        began = time.monotonic()
        age = 0.0
        while age < LONGEST_SECONDS and find_and_signal(run, kill=age > GRACE_SECONDS):
            time.sleep(POLL_SECONDS)
            age = time.monotonic() - began
    shutil.rmtree(folder, ignore_errors=True)


def find_and_signal(run: str, kill: bool) -> bool:
    """Return True if there are processes of this run. If `kill` is True, they get SIGKILL."""
    found = False
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), ExitStack() as stack:  # the process may be another user's, or gone
            held = os.pidfd_open(int(name))  # keeps the pid from being reused
            stack.callback(os.close, held)
            with open(f"/proc/{name}/environ", "rb") as stream:
                ours = f"{MARK}={run}".encode() in stream.read().split(b"\0")
            found = found or ours
            if ours and kill:
                signal.pidfd_send_signal(held, signal.SIGKILL)
    return found


if __name__ == "__main__":
    main()
