"""Files that exist only in the memory of the process that makes them."""

from __future__ import annotations

import os
from collections import deque

MOST_FILES = 256  # that are kept; the oldest is closed for a newer one

_kept: deque[int] = deque()


def make_memory_file() -> str:
    """The path of a new, empty file, which only processes of the same user can open.

    It lies under /proc, so it needs no disk and no folder, has no name that others could take
    first, and is gone with this process, however that ends.
    """
    _kept.append(os.memfd_create("evener"))
    while len(_kept) > MOST_FILES:
        os.close(_kept.popleft())
    return f"/proc/{os.getpid()}/fd/{_kept[-1]}"
