"""Find the requested devices, read their metrics, and check whether other programs use them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from evener.errors import RequestError

from .backend import Discovery, Vitals
from .registry import find_backend, find_here, open_here
from .terms import parse_request
from .types import Device, Source

GIB = 1 << 30


def discover(
    spec: str,
    *,
    only_visible: bool = True,
    environ: Mapping[str, str] | None = None,
    ray_address: str = "",
) -> Discovery:
    """Find the devices that a request such as `gpu:0,1` or `ray:HOST/gpu:0` selects.

    - `spec`: the request, as in `--devices`.
    - `only_visible`: whether `auto` and `gpu` select only devices that variables such as
      CUDA_VISIBLE_DEVICES make visible. A GPU that is named by index or UUID is used in any case.
      In a Ray cluster, the devices are also reserved.
    - `environ`: the environment variables; by default this process's.
    - `ray_address`: address of the Ray cluster; by default RAY_ADDRESS or this machine's cluster.

    On one machine, the result is in the order of the request. Raises `RequestError` if the request
    is invalid, if a device doesn't exist or is named twice, or if a memory limit is above the
    device's memory. Raises `DeviceError` if the GPUs' driver fails or the cluster can't be used.
    """
    terms = parse_request(spec)
    variables: Mapping[str, str] = {}
    if only_visible:
        variables = os.environ if environ is None else environ
    if terms[0].host is not None:
        from .cluster.discovery import discover_cluster

        found = discover_cluster(terms, ray_address, only_visible)
    else:
        found = find_here(terms, variables)
    counts = Counter((device.host, device.id) for device in found.devices)
    for device in found.devices:
        if counts[device.host, device.id] > 1:
            raise RequestError(f"{device.label} is named twice.", "Name each device once.")
        _check_limit(device)
    return found


def _check_limit(device: Device) -> None:
    """Raise `RequestError` if a device's memory limit is above its memory."""
    wanted = device.limit.memory_bytes
    there = _all_memory(device)
    if wanted is not None and there is not None and wanted > there:
        raise RequestError(
            f"{device.label} can't be limited to {wanted / GIB:.4g} GiB of memory: it has "
            f"{there / GIB:.4g} GiB.",
            "Give less, or leave the limit out.",
        )


def _all_memory(device: Device) -> int | None:
    """Return the total memory of a device in bytes, or None if it is unknown."""
    if not device.on_cpu:
        return device.memory_bytes
    if device.host:
        return None
    # all CPU slices share this memory, and more of it may be free later
    from .cpu import machine_memory_bytes

    return machine_memory_bytes()


def open_source(discovery: Discovery) -> Source:
    """Return a source that reads the devices' metrics. The caller has to close it.

    Raises DeviceError if the driver has been unloaded since the devices were found.
    """
    backend = find_backend(discovery.devices[0].kind)
    if discovery.devices[0].host and not backend.simulated:
        from .cluster.discovery import ClusterSource

        return ClusterSource(discovery.devices, discovery.notes, open_here)
    return backend.open_source(discovery)


BUSY_PERCENT = 20.0  # a desktop environment uses less
MOST_NAMED = 3
# A device with less free memory than this is full, because a framework's context and libraries
# alone take about as much.
FULL_SHARE = 0.05
FULL_LEAST_BYTES = 600 << 20
FULL_MOST_BYTES = 2 << 30
# a driver takes a while to reclaim the memory of a process that ended
SETTLE_SECONDS = 0.4
SETTLE_READS = 3


def find_others(devices: Sequence[Device]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check whether other programs fill the memory of devices or keep the devices busy.

    Returns messages about devices with too little free memory to measure on, and messages about
    busy devices. Call this before you start processes of your own, because they would count as
    other programs. A device has too little free memory if less than 5 % of it is free; this
    threshold is at least 600 MiB and at most 2 GiB. Such a device is read again after a moment,
    because a driver takes a while to free the memory of a process that has ended.
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


def _busy_note(device: Device, vitals: Vitals) -> str:
    """Return a warning if the device is busy for at least 20 % of the time, or else ""."""
    if vitals.busy_percent is None or vitals.busy_percent < BUSY_PERCENT:
        return ""
    pids = _name_pids(vitals)
    whose = f"others' work (pid {pids})" if pids else "work of no named process"
    begin = (
        f"{device.label} was busy {vitals.busy_percent:.0f} % of the time with {whose} when "
        f"this began"
    )
    return f"{begin}: what is measured holds while that goes on."


def _full_note(device: Device, vitals: Vitals) -> str:
    """Return a warning if the device has too little free memory to measure on, or else ""."""
    total = device.memory_bytes
    if total is None or vitals.used_bytes is None:
        return ""
    free = total - vitals.used_bytes
    enough = min(max(FULL_SHARE * total, FULL_LEAST_BYTES), FULL_MOST_BYTES)
    if free >= min(enough, device.usable_memory_bytes or enough):
        return ""
    pids = _name_pids(vitals)
    whose = (
        f"other processes (pid {pids}) hold"
        if pids
        else "processes that the driver doesn't name hold"
    )
    sizes = f"{max(0, free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return f"{device.label} has too little free memory to measure on, {sizes}: {whose} the rest."


def _name_pids(vitals: Vitals) -> str:
    """Return the ids of up to three processes as text, with "..." if there are more."""
    pids = [str(pid) for pid in vitals.processes]
    return ", ".join([*pids[:MOST_NAMED], *(["..."] if len(pids) > MOST_NAMED else [])])
