"""Which children a layout needs and what they are told: one over all GPUs, or a group with a rank for each device."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from evener.balancer.probes.measurement import Stand
from evener.balancer.probes.protocol import Build
from evener.balancer.types import Layout
from evener.devices.child_environment import ChildEnvironment
from evener.devices.types import Device
from evener.workloads.protocol import Input, Place, Precision

MIXED: Precision = "mixed_bfloat16"  # what the knob "mixed" means: no loss scaling is needed
ONE_PROCESS = ("towers", "mirrored")  # engines in which one process drives all devices
Groups = list[list[Device]]  # the devices of each child, in rank order


class Job(msgspec.Struct, frozen=True):
    """What the children train, and on what."""

    devices: tuple[Device, ...]
    workload: str
    framework: str  # tensorflow | torch | none
    settings: dict[str, Any] = {}
    precision: Precision = "float32"
    xla: bool = False
    input: Input = "host"
    engine: str = "auto"  # of TensorFlow's splits
    driver: str = ""


class Key(msgspec.Struct, frozen=True):
    """Which children can run a layout: its devices and how it lies on them; not its sizes."""

    kind: str
    positions: tuple[int, ...]
    processes: int
    placement: str
    knobs: tuple[str, ...]


def key_of(layout: Layout) -> Key:
    """The children that a layout needs."""
    return Key(layout.kind, layout.active, layout.processes, layout.placement, layout.knobs)


def engine_of(job: Job, key: Key) -> str:
    """How a split over these devices is kept in step; empty for a layout without a choice."""
    if key.kind != "split":
        return ""
    if job.framework == "torch":
        return "ddp"
    if job.framework == "none" or job.engine != "auto":
        return job.engine
    free = all(job.devices[i].kind == "gpu" and not job.devices[i].limit for i in key.positions)
    return "towers" if free else "multiworker"


def one_child(job: Job, key: Key) -> bool:
    """Whether one process drives all of its devices."""
    return key.kind == "place" or engine_of(job, key) in ONE_PROCESS


def groups_of(job: Job, key: Key) -> Groups:
    """The children: their devices, in rank order."""
    devices = [job.devices[i] for i in key.positions]
    if key.kind == "pack" and key.placement == "logical":
        devices = [_part_of(device, key.processes) for device in devices]
    return ([devices] if one_child(job, key) else [[device] for device in devices]) * key.processes


def stand_of(job: Job, key: Key, environments: Sequence[ChildEnvironment], busy: Mapping[int, float]) -> Stand:
    """How those children lie on the devices of the request; `busy`: cores that a step of a device keeps busy."""
    own_cores = all(job.devices[i].kind == "cpu" for i in key.positions)
    alone = len(environments) == 1 and len(key.positions) > 1
    threads = environments[0].threads or 1
    positions = key.positions * key.processes
    cores = tuple(busy.get(position, float(threads)) for position in positions)
    return Stand(positions, key.kind == "split", alone, own_cores, threads, cores)


def orders_of(
    job: Job, key: Key, groups: Groups, environments: Sequence[ChildEnvironment], stand: Stand
) -> list[Build]:
    """What each child shall build; a group meets at loopback ports that are free now."""
    grouped = key.kind == "split" and len(groups) > 1
    peers = tuple(f"127.0.0.1:{port}" for port in free_ports(len(groups))) if grouped else ()
    orders = []
    for rank, (group, environment) in enumerate(zip(groups, environments, strict=True)):
        place = Place(
            devices=tuple(f"{'CPU' if device.kind == 'cpu' else 'GPU'}:{i}" for i, device in enumerate(group)),
            memory_limit_bytes=tuple(_framework_limit(job, device) for device in group),
            rank=rank if grouped else 0,
            peers=peers,
            threads=environment.threads,
            engine=engine_of(job, key) or "auto",
            precision=MIXED if "mixed" in key.knobs else job.precision,
            xla=job.xla or "xla" in key.knobs,
            input=job.input,
            placement=key.placement if key.kind == "place" else "",
        )
        room, cores = environment.address_space_bytes, stand.busy_cores[rank]
        orders.append(Build(job.workload, job.framework, job.settings, place, _compute(group[0]), cores, room))
    return orders


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has at this moment."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in held]


def _part_of(device: Device, processes: int) -> Device:
    """The device held to an equal part of its memory, as a logical device has it."""
    size = device.usable_memory_bytes
    part = None if size is None else size // processes
    return msgspec.structs.replace(device, limit=msgspec.structs.replace(device.limit, memory_bytes=part))


def _compute(device: Device) -> float:
    """The share of its speed that a CPU slice is held to by spinning; a GPU's is held by MPS."""
    percent = device.limit.percent if device.kind == "cpu" else None
    return 1.0 if percent is None else percent / 100


def _framework_limit(job: Job, device: Device) -> int | None:
    """The cap that the workload itself sets; TensorFlow's and torch's on CPU slices are set from outside."""
    return device.limit.memory_bytes if device.kind == "gpu" or job.framework == "none" else None
