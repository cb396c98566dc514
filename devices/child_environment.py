"""The environment of a child that trains on its devices and on nothing else: variables, cores, memory."""

from __future__ import annotations

import os
import resource
import sys
from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path

import msgspec

import evener

from .backend import ChildEnvironment
from .registry import all_backends, find_backend
from .types import Device


def child_environment(devices: Sequence[Device], framework: str) -> ChildEnvironment:
    """The environment of one child that trains on `devices` with "tensorflow", "torch" or "none".

    DeviceError if a device is held to a limit that nothing here could enforce.
    """
    (kind, *more) = {device.kind for device in devices}
    if more:
        raise ValueError(f"one child can't train on devices of {1 + len(more)} kinds")
    backend = find_backend(kind)
    if backend.simulated:
        return ChildEnvironment({})
    made, hidden = backend.child_environment(devices, framework), [other.show(()) for other in all_backends()]
    return msgspec.structs.replace(made, variables=dict(ChainMap(made.variables, *hidden)))


def import_path(inherited: str) -> str:
    """PYTHONPATH for a child that must import this same evener.

    Where `evener` was found through a folder on `sys.path`, that folder leads. An editable install needs no folder: the
    checkout's would offer its other packages too, and a user's `workloads` folder may have the name of one.
    """
    home = Path(evener.__file__).resolve().parent.parent
    known = {Path(entry or os.curdir).resolve() for entry in sys.path}
    return os.pathsep.join(filter(None, (str(home) if home in known else "", inherited)))


def cap_address_space(room_bytes: int) -> None:
    """Let this process grow by `room_bytes` from now on; more ends in a failed allocation, which torch can catch."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = pages * resource.getpagesize() + room_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
