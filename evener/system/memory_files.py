"""Files that exist only in the memory of the process that creates them."""

from __future__ import annotations

import os
from collections import deque

MOST_FILES = 256  # most files kept open; the oldest is closed first

_kept: deque[int] = deque()


def make_memory_file() -> str:
    """Return the path of a new, empty in-memory file, which only processes of this user can open.

    The file lies under /proc, so it needs neither a disk nor a folder, nobody can take its name
    first, and it disappears with this process, however the process ends.
    """
    _kept.append(os.memfd_create("evener"))
    while len(_kept) > MOST_FILES:
        os.close(_kept.popleft())
    return f"/proc/{os.getpid()}/fd/{_kept[-1]}"
