"""What a request means on this machine: its devices, its workload, and the prober that measures them.

Everything that can be wrong with a request is found here, before a child is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from evener.balancer.objectives.registry import find_objective
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.launch_plan import ONE_PROCESS
from evener.balancer.probes.prober import Prober
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.request import Request, ResolvedRequest, check_request
from evener.devices.child_environment import child_environment
from evener.devices.cluster.agents import find_agent
from evener.devices.discover import discover
from evener.devices.limits import write_limit
from evener.devices.simulated.machine import Machine
from evener.devices.types import Device, group_by_host
from evener.errors import DeviceError, EvenerError, RequestError
from evener.workloads import registry

SIMULATED = "Measured on simulated devices, whose speeds are written down, not on hardware."
NOT_RUN = "simulated devices have the speeds of a model of their own."


def resolve_request(request: Request) -> ResolvedRequest:
    """Find devices and workload; RequestError or DeviceError says what is wrong or missing."""
    check_request(request)
    found = discover(request.devices, ray_address=request.ray_address)
    name = request.workload or registry.default_name(request.framework, found.devices[0].kind)
    entry = registry.find(name, request.framework)
    if found.machine is not None:
        _check_simulated(request)
    _check_engine(request.engine, entry.framework, found.devices)
    if find_objective(request.objective).needs_energy:
        _check_energy(found.devices, found.machine)
    _check_json(registry.resolve_settings(entry, request.settings))
    if found.machine is not None:
        own = (f"{name} was not run: {NOT_RUN}",) if ":" in name else ()
        notes = (*own, *found.notes, SIMULATED)
        return ResolvedRequest(request, found.devices, name, entry.framework, None, notes, found.machine)
    notes = (*found.notes, *_check_hosts(found.devices, entry.framework))
    largest = entry.largest_share
    return ResolvedRequest(request, found.devices, name, entry.framework, largest, notes, driver=found.driver)


def make_prober(resolved: ResolvedRequest, start_seconds: float = 0.0, error_file: Path | None = None) -> Prober:
    """The prober of these devices; its clock starts at `start_seconds`, tracebacks of children go to `error_file`."""
    request = resolved.request
    if resolved.machine is not None:
        return SimulatedProber(resolved.machine, request.seed, request.pace, start_seconds)
    return ChildProber(resolved, start_seconds=start_seconds, error_file=error_file)


def _check_hosts(devices: Sequence[Device], framework: str) -> tuple[str, ...]:
    """Notes on GPUs that others use; RequestError or DeviceError if a host can't train on its devices."""
    notes: list[str] = []
    for host, own in group_by_host(devices).items():
        try:
            notes += find_agent(host).call(check_here, own, framework) if host else check_here(own, framework)
        except EvenerError as fault:
            if host and host not in fault.message:
                raise type(fault)(f"{host}: {fault.message}", fault.remedy) from None
            raise
    return tuple(notes)


def check_here(devices: tuple[Device, ...], framework: str) -> tuple[str, ...]:
    """The same for devices of this machine."""
    _check_installed(framework)
    for device in devices:
        child_environment([device], framework)
    return _check_gpus(devices)


def _check_engine(engine: str, framework: str, devices: tuple[Device, ...]) -> None:
    """RequestError unless the engine exists for this framework and these devices."""
    if engine == "auto":
        return
    if framework != "tensorflow":
        raise RequestError(f"--engine {engine} is TensorFlow's; {framework} has none.", "Leave --engine out.")
    if engine in ONE_PROCESS and len(group_by_host(devices)) > 1:
        raise RequestError(f"--engine {engine} has one process for all devices.", "Use multiworker on several hosts.")
    limited = [d for d in devices if d.limit and (d.limit.percent or d.kind != "gpu")]
    if engine in ONE_PROCESS and limited:
        raise RequestError(
            f"{limited[0].label} is limited to {write_limit(limited[0].limit)}, which needs its own process; "
            f"--engine {engine} has one process for all devices.",
            "Use --engine multiworker, or leave the limit out.",
        )


def _check_energy(devices: Sequence[Device], machine: Machine | None) -> None:
    """RequestError for a device that can't report its energy."""
    cause = "samples per joule can't be compared."
    for position, device in enumerate(devices):
        if device.kind == "cpu":
            raise RequestError(f"CPU slices report no energy, so {cause}", "Leave --objective out, or choose GPUs.")
        if machine is not None and machine.devices[position].power_watts is None:
            remedy = "Leave --objective out, or give `power_watts` in a machine file."
            raise RequestError(f"The power of {device.label} isn't written down, so {cause}", remedy)


def _check_simulated(request: Request) -> None:
    """RequestError for an option that only real devices have."""
    for name, option in (("precision", "--precision"), ("xla", "--xla"), ("input", "--input"), ("engine", "--engine")):
        if getattr(request, name) != getattr(Request(), name):
            message = f"{option} has no effect on simulated devices, whose speeds are written down."
            raise RequestError(message, f"Leave {option} out.")


def _check_installed(framework: str) -> None:
    if framework != "none" and find_spec(framework) is None:
        raise RequestError(f"{framework} is not installed.", f"Install it: pip install 'evener[{framework}]'.")


def _check_json(settings: object) -> None:
    try:
        msgspec.json.encode(settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(
            f"A setting can't be written to the journal: {error}.", "Use numbers, text and lists."
        ) from None


def _check_gpus(devices: tuple[Device, ...]) -> tuple[str, ...]:
    """Notes on GPUs that others use; DeviceError if others hold the memory of all of them."""
    if devices[0].kind != "gpu":
        return ()
    from evener.devices.nvidia.busy_gpus import busy_notes, full_notes

    full = full_notes(devices)
    if len(full) == len(devices):
        raise DeviceError(" ".join(full), "Stop those processes, wait for them, or choose other --devices.")
    return (*full, *busy_notes(devices))
