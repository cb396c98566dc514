"""What a request means on this machine: its devices, its workload, and whoever measures them.

Everything that can be wrong with a request is found here, before a child is started.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import cast

import msgspec

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.launch_plan import ONE_PROCESS, Job
from evener.balancer.probes.prober import Prober
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.request import Request, check
from evener.devices.child_environment import child_environment
from evener.devices.discover import discover
from evener.devices.limits import write_limit
from evener.devices.simulated.machine import Machine
from evener.devices.types import Device
from evener.errors import RequestError
from evener.workloads import registry
from evener.workloads.protocol import Input, Precision

SIMULATED = "Measured on simulated devices, whose speeds are written down, not on hardware."


class Bench(msgspec.Struct, frozen=True):
    """A request that was understood."""

    request: Request
    devices: tuple[Device, ...]
    workload: str
    framework: str  # tensorflow | torch | none
    largest_share: int | None
    notes: tuple[str, ...]  # about the devices
    machine: Machine | None  # the physics, if the devices are simulated


def understand(request: Request) -> Bench:
    """Find devices and workload; RequestError or DeviceError says what is wrong or missing."""
    check(request)
    found = discover(request.devices)
    simulated = found.machine is not None
    name = request.workload or registry.default_name(request.framework, found.devices[0].kind)
    entry = registry.find(name, request.framework)
    _check_engine(request.engine, entry.framework, found.devices)
    settings = registry.resolve_settings(entry, request.settings)
    _check_json(settings)
    if not simulated:
        _check_installed(entry.framework)
        for device in found.devices:
            child_environment([device], entry.framework)
    largest = None if simulated else entry.largest_share
    notes = (*found.notes, SIMULATED) if simulated else (*found.notes, *_busy(found.devices))
    return Bench(request, found.devices, name, entry.framework, largest, notes, found.machine)


def make_prober(bench: Bench, start_seconds: float = 0.0) -> Prober:
    """Whoever measures these devices; its clock goes on from `start_seconds`."""
    request = bench.request
    if bench.machine is not None:
        return SimulatedProber(bench.machine, request.seed, request.pace, start_seconds)
    job = Job(
        devices=bench.devices,
        workload=bench.workload,
        framework=bench.framework,
        settings=request.settings,
        precision=cast(Precision, request.precision),
        xla=request.xla,
        input=cast(Input, request.input),
        engine=request.engine,
        driver=_driver(bench.devices),
    )
    return ChildProber(job, start_seconds=start_seconds)


def _check_engine(engine: str, framework: str, devices: tuple[Device, ...]) -> None:
    """RequestError unless the devices can be kept in step as asked for."""
    if engine == "auto":
        return
    if framework != "tensorflow" or devices[0].kind == "sim":
        whose = "simulated devices have none" if devices[0].kind == "sim" else f"{framework} has no choice of it"
        raise RequestError(f"--engine {engine} is TensorFlow's; {whose}.", "Leave --engine out.")
    held = [d for d in devices if d.limit and (d.limit.percent or d.kind != "gpu")]
    if engine in ONE_PROCESS and held:
        raise RequestError(
            f"{held[0].label} is held to {write_limit(held[0].limit)} in a process of its own; "
            f"--engine {engine} has one for all.",
            "Use --engine multiworker, or leave the limit out.",
        )


def _check_installed(framework: str) -> None:
    if framework != "none" and find_spec(framework) is None:
        raise RequestError(f"{framework} is not installed.", f"Install it: pip install 'evener[{framework}]'.")


def _check_json(settings: object) -> None:
    try:
        msgspec.json.encode(settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"A setting can't be journalled: {error}.", "Give numbers, texts and lists.") from None


def _busy(devices: tuple[Device, ...]) -> tuple[str, ...]:
    """What is said of GPUs that work for others already."""
    if devices[0].kind != "gpu":
        return ()
    from evener.devices.nvidia.busy_gpus import busy_notes

    return busy_notes(devices)


def _driver(devices: tuple[Device, ...]) -> str:
    """The GPUs' driver version; empty without GPUs, or if the driver has gone silent since."""
    if devices[0].kind != "gpu":
        return ""
    from evener.devices.nvidia.nvml_library import opened

    try:
        with opened() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # whatever the driver raises: the version is told, not needed
        return ""
