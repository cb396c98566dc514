"""Completion of a path as a shell does it."""

from __future__ import annotations

import os
from collections.abc import Sequence

MOST_ENTRIES = 5000


def complete_path(typed: str) -> str | None:
    """`typed` made longer by what every match has in common, or by the first match; None without one.

    A folder ends in a slash; hidden names are offered only if their dot is typed. Nothing is changed on the disk.
    """
    folder, _, start = typed.rpartition("/")
    place = os.path.expanduser(f"{folder}/" if folder or typed.startswith("/") else ".")
    try:
        with os.scandir(place) as entries:
            names = []
            for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
                if entry.name.startswith(start) and (start.startswith(".") or not entry.name.startswith(".")):
                    names.append(entry.name + ("/" if entry.is_dir() else ""))
    except OSError:
        return None
    if not names:
        return None
    head = typed[: len(typed) - len(start)]
    common = _shared_start(names)
    return head + (common if len(common) > len(start) else min(names))


def _shared_start(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    same = next((place for place, sign in enumerate(first) if last[place : place + 1] != sign), len(first))
    return first[:same]
