"""The job that a request means on this machine: its devices and its workload, found and checked.

Everything that can be wrong with a request is found here, before a run is made or a child is started.
"""

from __future__ import annotations

from evener.devices.discover import discover
from evener.devices.types import group_by_host
from evener.workloads import registry

from ..request import Job, Request, check_request
from ..search.problem import check_problem
from .checks import check_fit, check_hosts
from .problem import make_problem

SIMULATED = "Measured on simulated devices, whose speeds are written down, not on hardware."
NOT_RUN = "simulated devices have the speeds of a model of their own."


def take_in(request: Request) -> Job:
    """Find devices and workload; RequestError or DeviceError says what is wrong or missing."""
    check_request(request)
    found = discover(request.devices, ray_address=request.ray_address)
    name = request.workload or registry.default_name(request.framework, found.devices[0].kind)
    entry = registry.find(name, request.framework)
    settings = registry.resolve_settings(entry, request.settings)
    hosts = group_by_host(found.devices)
    check_fit(request, entry.framework, found, len(hosts), settings)
    if found.machine is not None:
        own = (f"{name} was not run: {NOT_RUN}",) if ":" in name else ()
        notes, largest = (*own, *found.notes, SIMULATED), None
    else:
        notes, largest = (*found.notes, *check_hosts(hosts, entry.framework)), entry.largest_share
    job = Job(request, found.devices, name, entry.framework, largest, notes, found.machine, found.driver)
    check_problem(make_problem(job))
    return job
