"""GPUs that work for others when a session begins: measurements beside that work hold only while it goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from evener.devices.nvidia.nvml_library import Handle, Library, find_handle, memory, opened
from evener.devices.nvidia.processes import GpuProcesses
from evener.devices.types import Device
from evener.errors import DeviceError

BUSY_PERCENT = 20.0  # of the time; a desktop takes less
MOST_NAMED = 3
# A GPU with less than this free is full: a framework's context and libraries alone take about as much.
FULL_SHARE, FULL_LEAST_BYTES, FULL_MOST_BYTES = 0.05, 600 << 20, 2 << 30
SETTLE_SECONDS, SETTLE_READS = 0.4, 3  # a driver takes a while to reclaim the memory of a process that ended


def busy_notes(devices: Sequence[Device]) -> tuple[str, ...]:
    """A sentence for each GPU that computes now; ask before a session starts its own children."""
    with suppress(DeviceError), opened() as nvml:
        return tuple(note for device in devices if (note := _busy_note(nvml, device)))
    return ()


def _busy_note(nvml: Library, device: Device) -> str:
    """Empty for a GPU that is idle, or doesn't tell."""
    with suppress(nvml.NVMLError):
        handle = find_handle(nvml, device.id)
        percent = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        if percent >= BUSY_PERCENT:
            pids = _pids(nvml, handle)
            whose = f"others' work (pid {pids})" if pids else "work of no named process"
            begin = f"{device.label} was busy {percent:.0f} % of the time with {whose} when this began"
            return f"{begin}: what is measured holds while that goes on."
    return ""


def full_notes(devices: Sequence[Device]) -> tuple[str, ...]:
    """A sentence for each GPU whose memory is held by others, all but 5 % (at least 600 MiB, at most 2 GiB)."""
    notes: list[str] = []
    with suppress(DeviceError), opened() as nvml:
        for _ in range(SETTLE_READS):
            notes = [note for device in devices if (note := _full_note(nvml, device))]
            if not notes:
                break
            time.sleep(SETTLE_SECONDS)
    return tuple(notes)


def _full_note(nvml: Library, device: Device) -> str:
    """Empty for a GPU with room for the device's own limit, or one that doesn't tell."""
    with suppress(nvml.NVMLError):
        handle = find_handle(nvml, device.id)
        total, used = memory(nvml, handle)
        if total is None or used is None:
            return ""
        free, enough = total - used, min(max(FULL_SHARE * total, FULL_LEAST_BYTES), FULL_MOST_BYTES)
        if free >= min(enough, device.usable_memory_bytes or enough):
            return ""
        pids = _pids(nvml, handle)
        whose = f"other processes (pid {pids}) hold" if pids else "processes that the driver doesn't name hold"
        sizes = f"{max(0, free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
        return f"{device.label} has too little free memory to measure on, {sizes}: {whose} the rest."
    return ""


def _pids(nvml: Library, handle: Handle) -> str:
    """The first few processes on a GPU; empty if the driver names none."""
    pids = [str(each.pid) for each in GpuProcesses(nvml, handle, False).read(0.0)]
    return ", ".join([*pids[:MOST_NAMED], *(["..."] if len(pids) > MOST_NAMED else [])])
