"""Checks of a request against the devices and the framework that were found for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import msgspec

from evener.devices.busy import find_others
from evener.devices.child_environment import child_environment
from evener.devices.cluster.agents import find_agent
from evener.devices.limits import write_limit
from evener.devices.listing import Discovery
from evener.devices.machine import Machine
from evener.devices.types import Device
from evener.errors import DeviceError, EvenerError, RequestError

from ..objectives.registry import find_objective
from ..probes.launch_plan import ONE_PROCESS
from ..request import Request


def check_fit(request: Request, framework: str, found: Discovery, hosts: int, settings: object) -> None:
    """RequestError for an option or a setting that these devices or this framework can't follow."""
    if found.machine is not None:
        _check_simulated(request)
    _check_engine(request.engine, framework, found.devices, hosts)
    if find_objective(request.objective).needs_energy:
        _check_energy(found.devices, found.machine)
    _check_json(settings)


def _check_simulated(request: Request) -> None:
    """RequestError for an option that only real devices have."""
    for name, option in (("precision", "--precision"), ("xla", "--xla"), ("input", "--input"), ("engine", "--engine")):
        if getattr(request, name) != getattr(Request(), name):
            message = f"{option} has no effect on simulated devices, whose speeds are written down."
            raise RequestError(message, f"Leave {option} out.")


def _check_engine(engine: str, framework: str, devices: Sequence[Device], hosts: int) -> None:
    """RequestError unless the engine exists for this framework and these devices."""
    if engine == "auto":
        return
    if framework != "tensorflow":
        raise RequestError(f"--engine {engine} is TensorFlow's; {framework} has none.", "Leave --engine out.")
    if engine in ONE_PROCESS and hosts > 1:
        raise RequestError(f"--engine {engine} has one process for all devices.", "Use multiworker on several hosts.")
    limited = [d for d in devices if d.limit and (d.limit.percent or d.on_cpu)]
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
        if device.on_cpu:
            raise RequestError(f"CPU slices report no energy, so {cause}", "Leave --objective out, or choose GPUs.")
        if machine is not None and machine.devices[position].power_watts is None:
            remedy = "Leave --objective out, or give `power_watts` in a machine file."
            raise RequestError(f"The power of {device.label} isn't written down, so {cause}", remedy)


def _check_json(settings: object) -> None:
    try:
        msgspec.json.encode(settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(
            f"A setting can't be written to the journal: {error}.", "Use numbers, text and lists."
        ) from None


def check_hosts(hosts: Mapping[str, tuple[Device, ...]], framework: str) -> tuple[str, ...]:
    """Notes on GPUs that others use; RequestError or DeviceError if a host can't train on its devices."""
    notes: list[str] = []
    for host, own in hosts.items():
        try:
            notes += find_agent(host).call(check_here, own, framework) if host else check_here(own, framework)
        except EvenerError as fault:
            if host and host not in fault.message:
                raise type(fault)(f"{host}: {fault.message}", fault.remedy) from None
            raise
    return tuple(notes)


def check_here(devices: tuple[Device, ...], framework: str) -> tuple[str, ...]:
    """Notes on devices of this machine that others use; an error if the framework can't train on them.

    DeviceError if others hold the memory of all of them.
    """
    _check_installed(framework)
    for device in devices:
        child_environment([device], framework)
    full, busy = find_others(devices)
    if len(full) == len(devices):
        raise DeviceError(" ".join(full), "Stop those processes, wait for them, or choose other --devices.")
    return (*full, *busy)


def _check_installed(framework: str) -> None:
    if framework != "none" and find_spec(framework) is None:
        raise RequestError(f"{framework} is not installed.", f"Install it: pip install 'evener[{framework}]'.")
