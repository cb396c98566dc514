"""What `--devices` means: the devices that a request names, and the source that samples them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from evener.devices.terms import Term, parse_request
from evener.devices.this_machine import Discovery, find_here
from evener.devices.types import Device, Source
from evener.errors import RequestError


def discover(
    spec: str, *, only_visible: bool = True, environ: Mapping[str, str] | None = None, ray_address: str = ""
) -> Discovery:
    """The devices that `spec` names, in its order.

    `only_visible`: `auto` and `gpu` keep to CUDA_VISIBLE_DEVICES, and a cluster's devices to those that Ray reserves
    for this process; a GPU of this machine that is named is taken whatever it says.
    RequestError: malformed, named twice, or not there. DeviceError: GPUs were asked for and the driver fails, or the
    Ray cluster at `ray_address` (default: RAY_ADDRESS, else this machine's) can't be used.
    """
    terms = parse_request(spec)
    variables = (os.environ if environ is None else environ) if only_visible else {}
    if terms[0].host is not None:
        found = _find_on_cluster(terms, ray_address, only_visible)
    else:
        found = _find_simulated(terms) if terms[0].kind == "sim" else find_here(terms, variables)
    counts = Counter((device.host, device.id) for device in found.devices)
    for device in found.devices:
        if counts[device.host, device.id] > 1:
            raise RequestError(f"{device.label} is named twice.", "Name each device once.")
    return found


def _find_on_cluster(terms: Sequence[Term], address: str, reserve: bool) -> Discovery:
    from evener.devices.cluster.discovery import discover_cluster

    return discover_cluster(terms, address, reserve)


def open_source(discovery: Discovery) -> Source:
    """What samples these devices; its owner closes it. DeviceError if the driver has gone meanwhile."""
    if discovery.machine is not None:
        from evener.devices.simulated.source import SimulatedSource

        return SimulatedSource(discovery.machine)
    if discovery.devices[0].host:
        from evener.devices.cluster.source import ClusterSource

        return ClusterSource(discovery.devices, discovery.notes, open_here)
    return open_here(discovery.devices, discovery.notes)


def open_here(devices: tuple[Device, ...], notes: tuple[str, ...] = ()) -> Source:
    """What samples devices of this machine."""
    if devices[0].kind == "gpu":
        from evener.devices.nvidia.source import NvmlSource

        return NvmlSource(devices, notes=notes)
    from evener.devices.cpu.source import CpuSource

    return CpuSource(devices, notes=notes)


def _find_simulated(terms: Sequence[Term]) -> Discovery:
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
