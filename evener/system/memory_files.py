"""Files that exist only in the memory of the process that creates them."""

from __future__ import annotations

import os
from collections import deque

MOST_FILES = 256  # maximum number of open files; the oldest is closed first

_kept: deque[int] = deque()


def make_memory_file() -> str:
    """Return the path of a new, empty in-memory file, which only processes of this user can open.

    The path is under /proc. Therefore the file needs neither a disk nor a folder, no other process
    can create it first, and it disappears with this process, however the process ends. After
    MOST_FILES further calls, the file is closed.
    """
    _kept.append(os.memfd_create("evener"))
    while len(_kept) > MOST_FILES:
        os.close(_kept.popleft())
    return f"/proc/{os.getpid()}/fd/{_kept[-1]}"
