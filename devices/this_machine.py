"""The devices of this machine that the terms of a request name: GPUs, or slices of the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from evener.devices.cuda_visible import find_gpu, order_note, visible_gpus
from evener.devices.simulated.machine import Machine
from evener.devices.terms import Term
from evener.devices.types import Device, Limit
from evener.errors import DeviceError, RequestError

CROWDED = 0.05  # of a GPU's memory: others' use above it is worth a note


class Discovery(msgspec.Struct, frozen=True):
    """The devices of a request, and notes on them."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()  # to be shown: what `auto` chose and why, a GPU that others use
    machine: Machine | None = None  # the physics, if the devices are simulated
    driver: str = ""  # of the GPUs


def find_here(terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
    """The GPUs or slices that terms of one kind name, in their order; `variables` may hide GPUs."""
    if terms[0].kind == "auto":
        return _automatic(terms[0].limit, variables)
    return _find_gpus(terms, variables) if terms[0].kind == "gpu" else _find_slices(terms)


def _automatic(limit: Limit, variables: Mapping[str, str]) -> Discovery:
    try:
        return _find_gpus((Term("gpu", limit=limit),), variables)
    except DeviceError as fault:
        found = _find_slices((Term("cpu", limit=limit),))
        each = len(found.devices[0].cores)
        named = ", ".join(device.label for device in found.devices)
        said = f"{fault.message} So the CPU is used: {named}, with {each} logical CPU{'s' if each > 1 else ''} each."
        return Discovery(found.devices, (said, *found.notes))


def _find_gpus(terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
    from evener.devices.nvidia.nvml_library import list_gpus

    listing = list_gpus()
    gpus = listing.devices
    if not gpus:
        raise DeviceError("The NVIDIA driver lists no GPU that answers.", "Check nvidia-smi and dmesg.")
    hidden = variables.get("CUDA_VISIBLE_DEVICES")
    chosen: list[Device] = []
    for term in terms:
        picked = (find_gpu(gpus, term.pick),) if term.pick else visible_gpus(gpus, hidden)
        if not picked:
            raise DeviceError(
                f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU.", "Unset it, or name GPUs as in gpu:0."
            )
        chosen += [_limited(device, term.limit) for device in picked]
    crowded = [
        f"{device.label} has {used / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB in use by others."
        for device in chosen
        if device.memory_bytes and (used := listing.used_bytes[device.id] or 0) > CROWDED * device.memory_bytes
    ]
    order = order_note(gpus, variables) if not all(term.pick for term in terms) else ""
    return Discovery(tuple(chosen), (*listing.notes, *filter(None, [order]), *crowded), driver=listing.driver)


def _find_slices(terms: Sequence[Term]) -> Discovery:
    from evener.devices.cpu.slices import slices
    from evener.system.cpu_topology import allowed_cpus

    counts = {term.slices for term in terms}
    if len(counts) > 1:
        raise RequestError("One request cuts the CPU in two ways.", "Use the same cpu/N everywhere.")
    every = slices(counts.pop())
    chosen: list[Device] = []
    for term in terms:
        picked = (_find_slice(every, term.pick),) if term.pick else every
        chosen += [_limited(device, term.limit) for device in picked]
    spare = len(allowed_cpus()) - sum(len(device.cores) for device in every)
    note = f"{len(every)} equal slices leave {spare} of {len(allowed_cpus())} logical CPUs unused."
    return Discovery(tuple(chosen), (note,) if spare else ())


def _find_slice(every: Sequence[Device], pick: str) -> Device:
    if re.fullmatch(r"\d{1,6}", pick, re.ASCII) and int(pick) < len(every):
        return every[int(pick)]
    raise RequestError(
        f"There is no slice {pick!r} of the CPU: it is cut into {len(every)}, from 0 to {len(every) - 1}.",
        "Pick one of them, or cut it finer with cpu/N:I.",
    )


def _limited(device: Device, limit: Limit) -> Device:
    return msgspec.structs.replace(device, limit=limit) if limit else device
