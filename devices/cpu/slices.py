"""Slices of the CPU as devices: disjoint sets of cores, each with an equal part of the memory that is free."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from evener.errors import RequestError
from evener.system.cgroups import container_memory_bytes
from evener.system.cpu_topology import allowed_cpus, core_groups, cut

from ..types import Device

DEFAULT_SLICES = 2
MEMORY_SHARE = 0.8  # of what is free, for the slices together; the rest is for this program and the system
MEMORY_STEP = 256 << 20  # sizes are rounded down to it, so that they repeat from run to run


def slices(count: int | None = None) -> tuple[Device, ...]:
    """The CPU cut into equal devices: two, or one on a machine with a single logical CPU, unless `count` says."""
    if count is not None and count < 1:
        raise RequestError(f"The CPU can't be cut into {count} slices.", "Ask for cpu/1 or more.")
    cpus = allowed_cpus()
    wanted = min(DEFAULT_SLICES, len(cpus)) if count is None else count
    part = int(available_memory_bytes() * MEMORY_SHARE / wanted)
    memory_bytes = part - part % MEMORY_STEP if part >= MEMORY_STEP else part
    return tuple(
        Device(f"cpu-{i}-of-{wanted}", i, product_name(), "cpu", memory_bytes, cores)
        for i, cores in enumerate(cut(core_groups(cpus), wanted))
    )


def available_memory_bytes() -> int:
    """Memory that can still be had: the machine's, or what the container leaves if that is less."""
    free: int = psutil.virtual_memory().available
    left = container_memory_bytes()
    return free if left is None else max(0, min(free, left))


@cache
def product_name() -> str:
    """The processor's product name, without trademark signs and the like."""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return re.sub(r"\((?:R|TM|C)\)|\bCPU\b|@.*|\bProcessor\b|\s+(?=\s)", "", found[1]).strip() or "CPU"
    return "CPU"
