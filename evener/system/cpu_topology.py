"""Slices of the CPU, so that a training runs on the same cores on which it was measured.

Slices are equal sets of the cores that this process may use; hardware threads of a core stay together while there are
enough cores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import RequestError
from .cgroups import container_cpus

TOPOLOGY = Path("/sys/devices/system/cpu")
_SLICE = re.compile(r"cpu-(\d{1,6})-of-(\d{1,6})")

Groups = tuple[tuple[int, ...], ...]


def allowed_cpus() -> tuple[int, ...]:
    """The logical CPUs that this process may run on, no more than its container's CPU quota."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    quota = container_cpus()
    if quota is None or quota >= len(cpus):
        return cpus
    whole_cores = [cpu for group in core_groups(cpus) for cpu in group]
    return tuple(sorted(whole_cores[: max(1, int(quota))]))


def core_groups(cpus: Iterable[int], topology: Path = TOPOLOGY) -> Groups:
    """The CPUs by physical core; each by itself where the topology is unknown."""
    wanted = sorted(set(cpus))
    groups: dict[tuple[int, ...], None] = {}
    for cpu in wanted:
        siblings = [cpu]
        with suppress(OSError, ValueError):
            text = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
            siblings = [each for each in parse_cpu_list(text) if each in wanted]
        groups[tuple(sorted({*siblings, cpu}))] = None
    return tuple(groups)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list of CPUs: `0-3,8` is 0, 1, 2, 3, 8; ValueError for anything else."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def cut(groups: Groups, count: int) -> Groups:
    """`count` equal core sets; hardware threads of one core stay together while there are enough cores.

    What doesn't divide is left out, from the end. RequestError if there are fewer CPUs than slices.
    """
    cpus = tuple(cpu for group in groups for cpu in group)
    if count > len(cpus):
        raise RequestError(
            f"The CPU can't be cut into {count} slices: this process may use {len(cpus)} logical CPUs.",
            f"Ask for cpu/{len(cpus)} or fewer.",
        )
    if len(groups) >= count:
        each = len(groups) // count
        sets = [tuple(cpu for group in groups[i * each : (i + 1) * each] for cpu in group) for i in range(count)]
        if len({len(cores) for cores in sets}) == 1:
            return tuple(tuple(sorted(cores)) for cores in sets)
    each = len(cpus) // count
    return tuple(tuple(sorted(cpus[i * each : (i + 1) * each])) for i in range(count))


def slice_cores(device: str, allowed: Iterable[int]) -> tuple[int, ...]:
    """The CPUs of the slice with this id ("cpu-0-of-2"), of those allowed; empty for other devices, or too few CPUs."""
    named = _SLICE.fullmatch(device)
    if named is None:
        return ()
    position, count = int(named[1]), int(named[2])
    groups = core_groups(allowed)
    if not 0 <= position < count <= sum(len(group) for group in groups):
        return ()
    return cut(groups, count)[position]
