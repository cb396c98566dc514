"""The devices that `--devices` names, and the source that samples them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

from evener.errors import RequestError

from .listing import Discovery
from .registry import find_backend, find_here, open_here
from .terms import parse_request
from .types import Source


def discover(
    spec: str, *, only_visible: bool = True, environ: Mapping[str, str] | None = None, ray_address: str = ""
) -> Discovery:
    """The devices that `spec` names, in its order.

    `only_visible`: `auto` and `gpu` keep to CUDA_VISIBLE_DEVICES or its like, and a cluster's devices to those that Ray
    reserves for this process; a GPU of this machine that is named is taken whatever it says.
    RequestError: malformed, named twice, or not there. DeviceError: GPUs were asked for and the driver fails, or the
    Ray cluster at `ray_address` (default: RAY_ADDRESS, else this machine's) can't be used.
    """
    terms = parse_request(spec)
    variables = (os.environ if environ is None else environ) if only_visible else {}
    if terms[0].host is not None:
        from .cluster.discovery import discover_cluster

        found = discover_cluster(terms, ray_address, only_visible)
    else:
        found = find_here(terms, variables)
    counts = Counter((device.host, device.id) for device in found.devices)
    for device in found.devices:
        if counts[device.host, device.id] > 1:
            raise RequestError(f"{device.label} is named twice.", "Name each device once.")
    return found


def open_source(discovery: Discovery) -> Source:
    """A source that samples these devices; its owner closes it. DeviceError if the driver has gone since."""
    backend = find_backend(discovery.devices[0].kind)
    if discovery.devices[0].host and not backend.simulated:
        from .cluster.source import ClusterSource

        return ClusterSource(discovery.devices, discovery.notes, open_here)
    return backend.open_source(discovery)
