"""Threads of libraries in this process, by their names."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_QUIET_LOOKS = 3  # in a row that find every thread asleep, and not woken in between
_LOOK_SECONDS = 0.001


def wait_until_asleep(name: str, seconds: float = 5.0) -> bool:
    """Return True once all threads of this name sleep, at once where there are none.

    False if one still works after `seconds`. Only Linux says what threads do; elsewhere it waits
    for a moment. Other threads may run Python meanwhile.
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
    """The state of each thread of this name, and how often it has gone to sleep so far."""
    found = {}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # of a thread that has ended
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if fields.get("Name") == name:
                found[task.name] = fields["State"], fields["voluntary_ctxt_switches"]
    return found
