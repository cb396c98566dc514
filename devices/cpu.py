"""Slices of the CPU as devices: disjoint sets of cores, each with an equal part of the memory that is free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from devices.base import Device
from devices.container import container_cpus, container_memory_bytes
from evener.errors import RequestError

DEFAULT_SLICES = 2
MEMORY_SHARE = 0.8  # of what is free, for the slices together; the rest is for this program and the system
MEMORY_STEP = 256 << 20  # sizes are rounded down to it, so that they repeat from run to run
TOPOLOGY = Path("/sys/devices/system/cpu")

Groups = tuple[tuple[int, ...], ...]


def allowed_cpus() -> tuple[int, ...]:
    """The logical CPUs that this process may run on, no more of them than its container gives time for."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    quota = container_cpus()
    if quota is None or quota >= len(cpus):
        return cpus
    whole_cores = [cpu for group in core_groups(cpus) for cpu in group]
    return tuple(sorted(whole_cores[: max(1, int(quota))]))


def core_groups(cpus: Iterable[int], topology: Path = TOPOLOGY) -> Groups:
    """The CPUs by physical core; each alone where the topology is unknown."""
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
    """The kernel's way to write CPUs: `0-3,8` is 0, 1, 2, 3, 8; ValueError for anything else."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def cut(groups: Groups, count: int) -> Groups:
    """`count` equal core sets; hardware threads of one core stay together while there are cores enough.

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


def slices(count: int | None = None) -> tuple[Device, ...]:
    """The CPU cut into equal devices: two, or one on a machine with a single logical CPU, unless `count` says."""
    if count is not None and count < 1:
        raise RequestError(f"The CPU can't be cut into {count} slices.", "Ask for cpu/1 or more.")
    cpus = allowed_cpus()
    wanted = min(DEFAULT_SLICES, len(cpus)) if count is None else count
    memory_bytes = slice_memory_bytes(wanted)
    return tuple(
        Device(f"cpu-{i}-of-{wanted}", i, product_name(), "cpu", memory_bytes, cores)
        for i, cores in enumerate(cut(core_groups(cpus), wanted))
    )


def slice_memory_bytes(count: int) -> int:
    """What each of `count` slices can have of the memory that is free now."""
    part = int(available_memory_bytes() * MEMORY_SHARE / count)
    return part - part % MEMORY_STEP if part >= MEMORY_STEP else part


def physical_cores(cores: Sequence[int]) -> int:
    """How many physical cores stand behind these logical CPUs."""
    return len(core_groups(cores))


def available_memory_bytes() -> int:
    """Memory that can still be had: the machine's, or what the container leaves if that is less."""
    import psutil

    free: int = psutil.virtual_memory().available
    left = container_memory_bytes()
    return free if left is None else max(0, min(free, left))


@cache
def product_name() -> str:
    """The processor as its maker calls it, without the decoration."""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return re.sub(r"\((?:R|TM|C)\)|\bCPU\b|@.*|\bProcessor\b|\s+(?=\s)", "", found[1]).strip() or "CPU"
    return "CPU"
