"""What `--devices` means: the devices that a request names, and the source that samples them.

    request = term ("," term)*
    term    = device ["@" limit]              the limit holds for what stands directly before it
    device  = "auto"                          NVIDIA GPUs; without any, slices of the CPU; stands alone
            | "gpu" [":" pick]                all GPUs, or one
            | "cpu" ["/" COUNT] [":" pick]    all slices of the CPU cut into COUNT (default 2), or one
            | "sim:" NAME                     from the catalogue
            | "sim:" FILE                     a machine file: ends in .toml or holds a "/"; stands alone
            | UUID                            GPU-... or MIG-...: a GPU, as in `gpu:UUID`
            | pick                            goes on with the kind of the term before it: `cpu:0,1`, `sim:t4,t4`
    pick    = INDEX | UUID or the unique beginning of one | NAME

So `cpu:0,1@60%` slows slice 1 alone, `cpu@60%` every slice, and `gpu:0,gpu:1@60%+8GiB` limits the second GPU. A
request has one kind of devices: GPUs, CPU slices and simulated devices can't train one step together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from evener.devices.cuda_visible import find_gpu, order_note, visible_gpus
from evener.devices.limits import parse_limit
from evener.devices.simulated.machine import Machine
from evener.devices.types import Device, Limit, Source
from evener.errors import DeviceError, RequestError

Kind = Literal["auto", "gpu", "cpu", "sim"]
REMEDY = "Write auto, gpu, gpu:0,2, cpu, cpu/4, cpu:0,1@60%, sim:gtx1080ti,gtx1080 or sim:machine.toml."
NO_LIMIT = Limit()
CROWDED = 0.05  # of a GPU's memory: others' use above it is worth a note
_TERM = re.compile(r"(auto|gpu|cpu|sim)(?:/(\d{1,6}))?(:(.*))?", re.IGNORECASE | re.ASCII | re.DOTALL)
_UUID = re.compile(r"(?:gpu|mig)-.+", re.IGNORECASE)


class Term(msgspec.Struct, frozen=True):
    """One term of a request."""

    kind: Kind
    pick: str = ""  # index, UUID, catalogue name or file; empty: all of the kind
    limit: Limit = NO_LIMIT
    slices: int | None = None  # cpu/N


class Discovery(msgspec.Struct, frozen=True):
    """The devices of a request, and notes on them."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()  # to be shown: what `auto` chose and why, a GPU that others use
    machine: Machine | None = None  # the physics, if the devices are simulated
    driver: str = ""  # of the GPUs


def discover(spec: str, *, only_visible: bool = True, environ: Mapping[str, str] | None = None) -> Discovery:
    """The devices that `spec` names, in its order.

    `only_visible`: `auto` and `gpu` keep to CUDA_VISIBLE_DEVICES; a GPU that is named is taken whatever it says.
    RequestError: malformed, named twice, or not there. DeviceError: GPUs were asked for and the driver fails.
    """
    terms = parse_request(spec)
    variables = (os.environ if environ is None else environ) if only_visible else {}
    kind = terms[0].kind
    if kind == "auto":
        return _automatic(terms[0].limit, variables)
    found = _gpus(terms, variables) if kind == "gpu" else _slices(terms) if kind == "cpu" else _simulated(terms)
    ids = [device.id for device in found.devices]
    for device in found.devices:
        if ids.count(device.id) > 1:
            raise RequestError(f"{device.label} is named twice.", "Name each device once.")
    return found


def open_source(discovery: Discovery) -> Source:
    """What samples these devices; its owner closes it. DeviceError if the driver has gone meanwhile."""
    if discovery.machine is not None:
        from evener.devices.simulated.source import SimulatedSource

        return SimulatedSource(discovery.machine)
    if discovery.devices[0].kind == "gpu":
        from evener.devices.nvidia.source import NvmlSource

        return NvmlSource(discovery.devices, notes=discovery.notes)
    from evener.devices.cpu.source import CpuSource

    return CpuSource(discovery.devices, notes=discovery.notes)


def parse_request(spec: str) -> tuple[Term, ...]:
    """The terms of a request, all of one kind; RequestError names the one that can't be read."""
    terms: list[Term] = []
    for text in spec.split(","):
        terms.append(_parse_term(text.strip(), terms[-1] if terms else None, spec))
    kinds = list(dict.fromkeys(term.kind for term in terms))
    if "auto" in kinds and len(terms) > 1:
        raise RequestError(f"auto can't be combined, as in {spec!r}.", "Ask for auto alone, or name the devices.")
    if len(kinds) > 1:
        raise RequestError(
            f"{spec!r} mixes {' and '.join(kinds)}: they can't train one step together.",
            "Ask for devices of one kind.",
        )
    return tuple(terms)


def _parse_term(text: str, before: Term | None, spec: str) -> Term:
    body, limit = _split_limit(text)
    if not body:
        raise RequestError(f"One part of {spec!r} is empty.", REMEDY)
    found = _TERM.fullmatch(body)
    if found is None:
        if _UUID.fullmatch(body):
            return Term("gpu", body, limit)
        if before is not None and before.pick:
            return Term(before.kind, body, limit, before.slices)
        raise RequestError(f"{body!r} is not a device.", REMEDY)
    kind: Kind = found[1].lower()  # type: ignore[assignment]
    pick = (found[4] or "").strip()
    if (found[3] and not pick) or (kind == "sim" and not pick):
        raise RequestError(f"{body!r} names no device after the colon.", REMEDY)
    if (found[2] and kind != "cpu") or (found[3] and kind == "auto"):
        raise RequestError(f"{body!r} is not a device.", REMEDY)
    return Term(kind, pick, limit, int(found[2]) if found[2] else None)


def _split_limit(text: str) -> tuple[str, Limit]:
    if "@" not in text or text.lower().endswith(".toml"):
        return text, NO_LIMIT
    body, _, limit = text.rpartition("@")
    return body.strip(), parse_limit(limit)


def _automatic(limit: Limit, variables: Mapping[str, str]) -> Discovery:
    try:
        return _gpus((Term("gpu", limit=limit),), variables)
    except DeviceError as fault:
        found = _slices((Term("cpu", limit=limit),))
        each = len(found.devices[0].cores)
        named = ", ".join(device.label for device in found.devices)
        said = f"{fault.message} So the CPU is used: {named}, with {each} logical CPU{'s' if each > 1 else ''} each."
        return Discovery(found.devices, (said, *found.notes))


def _gpus(terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
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


def _slices(terms: Sequence[Term]) -> Discovery:
    from evener.cpu_topology import allowed_cpus
    from evener.devices.cpu.slices import slices

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


def _simulated(terms: Sequence[Term]) -> Discovery:
    from evener.devices.simulated.machine_file import catalogue, load_machine

    files = [term.pick for term in terms if term.pick.lower().endswith(".toml") or "/" in term.pick]
    if files and len(terms) > 1:
        raise RequestError(
            f"The machine file {files[0]!r} can't be combined with other devices.", "Add them to the file."
        )
    machine = load_machine(files[0]) if files else catalogue([term.pick for term in terms])
    limits = (terms[0].limit,) * len(machine.devices) if files else tuple(term.limit for term in terms)
    if any(limits):
        machine = msgspec.structs.replace(machine, limits=limits)
    return Discovery(machine.described(), (), machine)


def _limited(device: Device, limit: Limit) -> Device:
    return msgspec.structs.replace(device, limit=limit) if limit else device
