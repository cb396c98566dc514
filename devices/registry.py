"""The kinds of devices that evener supports, and the environment of processes that use them.

To support another vendor, add a line to BACKENDS.
"""

from __future__ import annotations

import os
import re
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import msgspec

import evener
from evener.errors import DeviceError, RequestError

from .backend import Backend, ChildEnvironment, Discovery
from .types import Device, Limit, Source, Term

# kind -> "module:class", which is imported when first needed; `auto` takes the first kind that this
# machine has
BACKENDS = {
    "gpu": "evener.devices.nvidia.backend:NvidiaGpus",
    "cpu": "evener.devices.cpu:CpuSlices",
    "sim": "evener.devices.simulated:SimulatedDevices",
}


def find_backend(kind: str) -> Backend:
    """Return the backend for a kind of devices.

    Raises RequestError if the kind is unknown.
    """
    if kind not in BACKENDS:
        raise RequestError(
            f"This evener has no devices of the kind {kind!r}.", f"It has {', '.join(BACKENDS)}."
        )
    return _load(BACKENDS[kind])


def all_backends() -> tuple[Backend, ...]:
    """Return all registered backends, in the order in which `auto` tries them."""
    return tuple(_load(place) for place in BACKENDS.values())


def name_maker(devices: Iterable[Device]) -> str:
    """Return the maker of the first device that has one, such as "NVIDIA", or "" if none has."""
    makers = (find_backend(device.kind).maker for device in devices if device.kind in BACKENDS)
    return next(filter(None, makers), "")


def kind_of(name: str) -> str:
    """Return the kind of a device from its label or id, such as "gpu" for "GPU:0"."""
    return re.split("[:-]", name.lower(), maxsplit=1)[0]


def is_simulated(names: Iterable[str]) -> bool:
    """Return True if any of these labels or ids is that of a simulated device."""
    return any(
        find_backend(kind).simulated for kind in set(map(kind_of, names)) if kind in BACKENDS
    )


def find_here(terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
    """Find the devices of this machine that a request selects.

    `terms` are the parsed parts of the request, which are all for one kind of devices. `variables`
    are environment variables, such as CUDA_VISIBLE_DEVICES. For `auto`, the accelerators of this
    machine are returned, or else CPU slices and a message that says why.
    """
    if terms[0].kind != "auto":
        return find_backend(terms[0].kind).find(terms, variables)
    limit = terms[0].limit
    faults = []
    for backend in all_backends():
        if backend.own_memory:
            try:
                return backend.find((Term(backend.kind, limit=limit),), variables)
            except DeviceError as fault:
                faults.append(fault.message)
    return _use_the_cpu(limit, variables, " ".join(faults))


def _use_the_cpu(limit: Limit, variables: Mapping[str, str], reason: str) -> Discovery:
    """Return all CPU slices, with a message that says why they are used.

    The message begins with `reason`.
    """
    found = find_backend("cpu").find((Term("cpu", limit=limit),), variables)
    each = len(found.devices[0].cores)
    named = ", ".join(device.label for device in found.devices)
    cpus = f"{each} logical CPU{'s' if each > 1 else ''}"
    said = f"{reason} So the CPU is used: {named}, with {cpus} each."
    return Discovery(found.devices, (said, *found.notes))


def open_here(devices: tuple[Device, ...], notes: tuple[str, ...] = ()) -> Source:
    """Return a source that reads devices of this machine, which must all be of one kind.

    Raises DeviceError if the driver has been unloaded since the devices were found.
    """
    return find_backend(devices[0].kind).open_source(Discovery(devices, notes))


@cache
def _load(place: str) -> Backend:
    module, _, name = place.partition(":")
    backend: Backend = getattr(import_module(module), name)()
    return backend


def child_environment(devices: Sequence[Device], framework: str) -> ChildEnvironment:
    """Return the environment of a process that trains on these devices and sees no others.

    `framework` is "tensorflow", "torch" or "none". Raises DeviceError if a limit can't be enforced,
    and ValueError if the devices are of several kinds.
    """
    (kind, *more) = {device.kind for device in devices}
    if more:
        raise ValueError(f"one child can't train on devices of {1 + len(more)} kinds")
    backend = find_backend(kind)
    if backend.simulated:
        return ChildEnvironment({})
    made = backend.child_environment(devices, framework)
    hidden = [other.show(()) for other in all_backends()]
    return msgspec.structs.replace(made, variables=dict(ChainMap(made.variables, *hidden)))


def import_path(inherited: str) -> str:
    """Return a PYTHONPATH that makes a child process import the same evener as this one.

    `inherited` is the current PYTHONPATH. If evener is installed, it is returned unchanged.
    """
    home = Path(evener.__file__).resolve().parent.parent
    known = {Path(entry or os.curdir).resolve() for entry in sys.path}
    # An editable install has no such directory. The checkout isn't added then, because its other
    # packages, such as `workloads`, may clash with the user's.
    return os.pathsep.join(filter(None, (str(home) if home in known else "", inherited)))
