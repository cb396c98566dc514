"""Files that exist only in the memory of the process that creates them."""

from __future__ import annotations

import os
from collections import deque

MOST_FILES = 256  # maximum number of open files; the oldest is closed first

_kept: deque[int] = deque()


def make_memory_file() -> str:
    """Return the path of a new, empty file in memory.

    Only processes of this user can open it. It disappears with this process, and after MOST_FILES
    further calls.
    """
    # The path is under /proc, so the file needs neither disk nor folder, and no other process can
    # create it first.
    _kept.append(os.memfd_create("evener"))
    while len(_kept) > MOST_FILES:
        os.close(_kept.popleft())
    return f"/proc/{os.getpid()}/fd/{_kept[-1]}"
