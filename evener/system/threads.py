"""Wait until threads are idle."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
# consecutive readings in which every thread must be asleep, without waking in between
_QUIET_LOOKS = 3
_LOOK_SECONDS = 0.001


def wait_until_asleep(name: str, seconds: float = 5.0) -> bool:
    """Wait until all threads of this process with this name are asleep, and return True.

    Returns False if they aren't after `seconds` seconds. Returns True at once if there are no such
    threads. Without `/proc`, it waits 50 ms and returns True.
    """
    if not _TASKS.is_dir():
        time.sleep(50 * _LOOK_SECONDS)
        return True
    deadline = time.monotonic() + seconds
    quiet = 0
    before = _read_threads(name)
    while before and quiet < _QUIET_LOOKS:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
        now = _read_threads(name)
        asleep = all(state.startswith("S") for state, _ in now.values())
        quiet = quiet + 1 if asleep and now == before else 0
        before = now
    return True


def _read_threads(name: str) -> dict[str, tuple[str, str]]:
    """Return the state and the number of context switches of each thread with this name."""
    found = {}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # of a thread that has ended
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if fields.get("Name") == name:
                # as the kernel writes them; only voluntary switches count
                found[task.name] = fields["State"], fields["voluntary_ctxt_switches"]
    return found
