"""GPUs that work for others when a session begins: what is measured beside that work holds while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from evener.devices.nvidia.nvml_library import Library, find_handle, opened
from evener.devices.nvidia.processes import GpuProcesses
from evener.devices.types import Device
from evener.errors import DeviceError

BUSY_PERCENT = 20.0  # of the time; a desktop takes less
MOST_NAMED = 3


def busy_notes(devices: Sequence[Device], library: Library | None = None) -> tuple[str, ...]:
    """A sentence for each GPU that computes now; to be asked before a session's own children live."""
    notes = []
    with suppress(DeviceError), opened(library) as nvml:
        for device in devices:
            with suppress(nvml.NVMLError):
                handle = find_handle(nvml, device.id)
                percent = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                if percent >= BUSY_PERCENT:
                    pids = [each.pid for each in GpuProcesses(nvml, handle, False).read(0.0)]
                    notes.append(_note(device, percent, pids))
    return tuple(notes)


def _note(device: Device, percent: float, pids: Sequence[int]) -> str:
    more = ", ..." if len(pids) > MOST_NAMED else ""
    whose = f"others' work (pid {', '.join(map(str, pids[:MOST_NAMED]))}{more})" if pids else "work of no named process"
    return (
        f"{device.label} was busy {percent:.0f} % of the time with {whose} when this began: "
        "what is measured holds while that goes on."
    )
