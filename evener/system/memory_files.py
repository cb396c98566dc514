"""Temporary files in memory that other processes can open."""

from __future__ import annotations

import os
from collections import deque

MOST_FILES = 256  # maximum number of open files; the oldest is closed first

_kept: deque[int] = deque()


def make_memory_file() -> str:
    """Create an empty file in memory, and return a path at which other processes can open it.

    It exists until this process ends or has created 256 more such files.
    """
    # The path is under /proc, so the file needs neither disk nor folder, and no other process can
    # create it first.
    _kept.append(os.memfd_create("evener"))
    while len(_kept) > MOST_FILES:
        os.close(_kept.popleft())
    return f"/proc/{os.getpid()}/fd/{_kept[-1]}"
