"""What `--devices` means: the devices that a request names, and the source that samples them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from evener.devices.terms import Term, parse_request
from evener.devices.this_machine import Discovery, find_here
from evener.devices.types import Source
from evener.errors import RequestError


def discover(
    spec: str, *, only_visible: bool = True, environ: Mapping[str, str] | None = None, ray_address: str = ""
) -> Discovery:
    """The devices that `spec` names, in its order.

    `only_visible`: `auto` and `gpu` keep to CUDA_VISIBLE_DEVICES; a GPU that is named is taken whatever it says.
    RequestError: malformed, named twice, or not there. DeviceError: GPUs were asked for and the driver fails, or the
    Ray cluster at `ray_address` (default: RAY_ADDRESS, else this machine's) can't be used.
    """
    found = _find(
        parse_request(spec), (os.environ if environ is None else environ) if only_visible else {}, ray_address
    )
    counts = Counter((device.host, device.id) for device in found.devices)
    for device in found.devices:
        if counts[device.host, device.id] > 1:
            raise RequestError(f"{device.label} is named twice.", "Name each device once.")
    return found


def _find(terms: Sequence[Term], variables: Mapping[str, str], ray_address: str) -> Discovery:
    if terms[0].host is not None:
        from evener.devices.cluster.discovery import discover_cluster

        return discover_cluster(terms, ray_address)
    return _find_simulated(terms) if terms[0].kind == "sim" else find_here(terms, variables)


def open_source(discovery: Discovery) -> Source:
    """What samples these devices; its owner closes it. DeviceError if the driver has gone meanwhile."""
    if discovery.machine is not None:
        from evener.devices.simulated.source import SimulatedSource

        return SimulatedSource(discovery.machine)
    if host := discovery.devices[0].host:
        raise RequestError(
            "The monitor shows the devices of one machine, without Ray.", f"Run evener monitor on {host}."
        )
    if discovery.devices[0].kind == "gpu":
        from evener.devices.nvidia.source import NvmlSource

        return NvmlSource(discovery.devices, notes=discovery.notes)
    from evener.devices.cpu.source import CpuSource

    return CpuSource(discovery.devices, notes=discovery.notes)


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
