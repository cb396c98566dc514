"""Fills a disk."""

from __future__ import annotations

import os
from pathlib import Path


def fill(folder: Path, spare_bytes: int) -> None:
    """Fill the disk of a folder until about this much space is left."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with (folder / "filler").open("wb") as stream:
        stream.write(b"x" * max(0, free - spare_bytes))
