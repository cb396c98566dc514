"""Which CPUs a CPU slice of a plan owns, so that a training runs where it was measured.

The cut is that of `--devices cpu`: equal sets, hardware threads of one core together while there are cores enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
_SLICE = re.compile(r"cpu-(\d{1,6})-of-(\d{1,6})")


def slice_cores(device: str, allowed: Iterable[int]) -> tuple[int, ...]:
    """The CPUs of the slice with this id ("cpu-0-of-2"), of those allowed; empty for another device, or if too few."""
    named = _SLICE.fullmatch(device)
    if named is None:
        return ()
    position, count = int(named[1]), int(named[2])
    groups = _core_groups(sorted(set(allowed)))
    cpus = [cpu for group in groups for cpu in group]
    if not 0 <= position < count <= len(cpus):
        return ()
    if len(groups) >= count:
        each = len(groups) // count
        sets = [[cpu for group in groups[i * each : (i + 1) * each] for cpu in group] for i in range(count)]
        if len({len(cores) for cores in sets}) == 1:
            return tuple(sorted(sets[position]))
    each = len(cpus) // count
    return tuple(sorted(cpus[position * each : (position + 1) * each]))


def physical_cores(cpus: Iterable[int]) -> int:
    """How many physical cores stand behind these logical CPUs."""
    return len(_core_groups(sorted(set(cpus))))


def _core_groups(cpus: list[int]) -> tuple[tuple[int, ...], ...]:
    """The CPUs by physical core; each alone where the topology is unknown."""
    groups: dict[tuple[int, ...], None] = {}
    for cpu in cpus:
        siblings = {cpu}
        with suppress(OSError, ValueError):
            text = (TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
            siblings |= _parse_cpu_list(text) & set(cpus)
        groups[tuple(sorted(siblings))] = None
    return tuple(groups)


def _parse_cpu_list(text: str) -> set[int]:
    """The kernel's way to write CPUs: `0-3,8` is 0, 1, 2, 3, 8; ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
