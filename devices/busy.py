"""Devices that work for others when a session begins: measurements beside that work hold only while it goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .registry import find_backend
from .types import Device
from .vitals import Vitals

BUSY_PERCENT = 20.0  # of the time; a desktop takes less
MOST_NAMED = 3
# A device with less than this free is full: a framework's context and libraries alone take about as much.
FULL_SHARE, FULL_LEAST_BYTES, FULL_MOST_BYTES = 0.05, 600 << 20, 2 << 30
SETTLE_SECONDS, SETTLE_READS = 0.4, 3  # a driver takes a while to reclaim the memory of a process that ended


def find_others(devices: Sequence[Device]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A sentence for each device whose memory is held by others, and one for each that computes for them now.

    Memory is held if all but 5 % of it is in use (at least 600 MiB, at most 2 GiB are left). Ask before a session
    starts its own children.
    """
    opened = [(device, find_backend(device.kind).open_vitals(device)) for device in devices]
    readers = [(device, reader) for device, reader in opened if reader]
    for _ in range(SETTLE_READS):
        seen = [(device, reader.read(True)) for device, reader in readers]
        full = tuple(filter(None, (_full_note(*each) for each in seen)))
        if not full:
            break
        time.sleep(SETTLE_SECONDS)
    for _, reader in readers:
        reader.close()
    return full, tuple(filter(None, (_busy_note(*each) for each in seen)))


def _busy_note(device: Device, seen: Vitals) -> str:
    """The sentence on a device that is busy; empty for one that is idle, or doesn't tell."""
    if seen.busy_percent is None or seen.busy_percent < BUSY_PERCENT:
        return ""
    pids = _name_pids(seen)
    whose = f"others' work (pid {pids})" if pids else "work of no named process"
    begin = f"{device.label} was busy {seen.busy_percent:.0f} % of the time with {whose} when this began"
    return f"{begin}: what is measured holds while that goes on."


def _full_note(device: Device, seen: Vitals) -> str:
    """The sentence on a device that is full; empty for one with room for its own limit, or that doesn't tell."""
    total = device.memory_bytes
    if total is None or seen.used_bytes is None:
        return ""
    free, enough = total - seen.used_bytes, min(max(FULL_SHARE * total, FULL_LEAST_BYTES), FULL_MOST_BYTES)
    if free >= min(enough, device.usable_memory_bytes or enough):
        return ""
    pids = _name_pids(seen)
    whose = f"other processes (pid {pids}) hold" if pids else "processes that the driver doesn't name hold"
    sizes = f"{max(0, free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return f"{device.label} has too little free memory to measure on, {sizes}: {whose} the rest."


def _name_pids(seen: Vitals) -> str:
    """The first few processes on a device; empty if the driver names none."""
    pids = [str(pid) for pid in seen.processes]
    return ", ".join([*pids[:MOST_NAMED], *(["..."] if len(pids) > MOST_NAMED else [])])
