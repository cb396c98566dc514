"""Plans the processes of a layout: which to start, how to build, and which idle ones to kill.

Idle PyTorch processes release their cache, and report how much memory they still hold. TensorFlow's
allocator never releases memory, so an idle process still holds its peak, and somewhat more.

In this module, `group_key` is a layout without its sizes (`Layout.group_key`). Layouts with equal
keys run in the same processes.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec

from evener.devices.backend import ChildEnvironment
from evener.devices.registry import find_backend
from evener.devices.types import Device, group_by_host
from evener.workloads.protocol import Input, Precision, WorkerSetup

from ..request import Job
from ..types import MEASURED_PART, Layout, Probe
from .protocol import Build

MIXED: Precision = "mixed_bfloat16"  # the meaning of the knob "mixed": no loss scaling is needed
WORKERS = "workers"  # the prefix of knobs that set the loader workers
LOOPBACK = "127.0.0.1"
ONE_PROCESS = ("towers",)  # engines in which one process drives all devices
OPEN_SERVERS = (
    "TensorFlow's engine multiworker listens on all network addresses of this machine. Anyone who "
    "can connect to its ports can run code as you: see docs/security.md."
)
MOST_HELD = 256  # maximum number of sockets that are held


def choose_engine(job: Job, group_key: Layout) -> str:
    """Return the engine that synchronizes a layout's devices, or "" if they train separately.

    `group_key` is the layout without its sizes.
    """
    if not group_key.traits.together:
        return ""
    return choose_group_engine(job, [job.devices[i] for i in group_key.active])


def choose_group_engine(job: Job, devices: Sequence[Device]) -> str:
    """Return the engine that synchronizes training on these devices.

    For PyTorch, it is "ddp". For TensorFlow, it is the engine that the request names. If the
    request leaves the choice open, it is "towers" for GPUs of a single host that have no limits,
    else "multiworker".
    """
    engine = job.request.engine
    if job.framework == "torch":
        return "ddp"
    if job.framework == "none" or engine != "auto":
        return engine
    unlimited_gpus = all(
        find_backend(device.kind).own_memory and not device.limit for device in devices
    )
    return "towers" if unlimited_gpus and len(group_by_host(devices)) == 1 else "multiworker"


def runs_in_one_process(job: Job, group_key: Layout) -> bool:
    """Return whether one process drives all devices of a layout.

    `group_key` is the layout without its sizes.
    """
    return group_key.traits.placed or choose_engine(job, group_key) in ONE_PROCESS


def assign_devices(job: Job, group_key: Layout) -> list[list[Device]]:
    """Return the devices that each process of a layout uses, by rank.

    `group_key` is the layout without its sizes.
    """
    devices = [job.devices[i] for i in group_key.active]
    if group_key.traits.side_by_side and group_key.placement == "logical":
        devices = [_split_memory(device, group_key.processes) for device in devices]
    one_process = runs_in_one_process(job, group_key)
    return ([devices] if one_process else [[device] for device in devices]) * group_key.processes


def map_ranks(
    job: Job,
    group_key: Layout,
    environments: Sequence[ChildEnvironment],
    busy_cores: Mapping[int, float],
) -> RankMap:
    """Return which devices the ranks of a layout use, and how many CPU cores each rank keeps busy.

    `busy_cores` maps positions to the measured number of busy cores.
    """
    threads = environments[0].threads or 1
    positions = group_key.active * group_key.processes
    return RankMap(
        positions=positions,
        one_process=len(environments) == 1 and len(group_key.active) > 1,
        own_cores=all(job.devices[i].on_cpu for i in group_key.active),
        threads=threads,
        busy_cores=tuple(busy_cores.get(position, float(threads)) for position in positions),
    )


def build_commands(
    job: Job,
    group_key: Layout,
    assigned: Sequence[Sequence[Device]],
    environments: Sequence[ChildEnvironment],
    ranks: RankMap,
    peers: tuple[str, ...] = (),
) -> list[Build]:
    """Return the commands that make each rank of a layout build the user's workload.

    `assigned` lists the devices of each rank. `peers` has the address or the file at which each
    rank meets the others; empty if the ranks train independently.
    """
    request = job.request
    grouped = bool(peers)
    commands = []
    for rank, (devices, environment) in enumerate(zip(assigned, environments, strict=True)):
        setup = WorkerSetup(
            devices=tuple(
                find_backend(d.kind).name_in(job.framework, i) for i, d in enumerate(devices)
            ),
            memory_limit_bytes=tuple(_framework_limit(job.framework, device) for device in devices),
            rank=rank if grouped else 0,
            peers=peers,
            trainings=group_key.processes,
            threads=environment.threads,
            precision=MIXED if "mixed" in group_key.knobs else cast(Precision, request.precision),
            xla=request.xla or "xla" in group_key.knobs,
            input=cast(Input, request.input),
            placement=group_key.placement if group_key.traits.placed else "",
            loader_workers=find_workers(group_key.knobs),
            state=_list_parts(group_key),
        )
        commands.append(
            Build(
                workload=job.workload,
                framework=job.framework,
                settings=request.settings,
                setup=setup,
                compute=_compute_share(devices[0]),
                parallelism=ranks.busy_cores[rank],
                device_ids=tuple(device.id for device in devices),
                in_host_memory=not any(find_backend(one.kind).own_memory for one in devices),
                address_space_bytes=environment.address_space_bytes,
            )
        )
    return commands


def _list_parts(group_key: Layout) -> tuple[float, ...]:
    """Return the part of the model's state of each rank; empty without shards."""
    if not group_key.traits.sharded:
        return ()
    if not group_key.state:
        return _make_solo_parts(len(group_key.shares))
    return tuple(group_key.state[i] for i in group_key.active)


def _make_solo_parts(devices: int) -> tuple[float, ...]:
    """Return how to divide a model's state to measure a single device of a sharded layout.

    The first fraction is for that device, and is small. The other devices, which don't run, get
    equal fractions of the rest.
    """
    others = devices - 1
    return (MEASURED_PART, *((1 - MEASURED_PART) / others for _ in range(others)))


def find_workers(knobs: Sequence[str]) -> int | None:
    """Return the number of data loader workers that a layout's options ask for, or None."""
    numbers = [knob.removeprefix(WORKERS) for knob in knobs if knob.startswith(WORKERS)]
    return int(numbers[0]) if numbers else None


# sockets bound to the ports that were found, so that no other program gets the ports
_held: deque[int] = deque()


def reserve_free_ports(count: int, address: str = LOOPBACK) -> list[int]:
    """Return free TCP ports, and keep them bound so that no other program gets them.

    Processes can still listen on them with SO_REUSEADDR.
    """
    ports = []
    for _ in range(count):
        with socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, 0))
            ports.append(int(made.getsockname()[1]))
            _held.append(made.detach())
    while len(_held) > MOST_HELD:
        os.close(_held.popleft())
    return ports


def _split_memory(device: Device, processes: int) -> Device:
    """Return the device with its memory limit divided among processes."""
    size = device.usable_memory_bytes
    part = None if size is None else size // processes
    return msgspec.structs.replace(
        device, limit=msgspec.structs.replace(device.limit, memory_bytes=part)
    )


def _compute_share(device: Device) -> float:
    """Return the fraction of a device's speed that a process may use.

    It is below 1 only for CPU slices with a limit, which are slowed by spinning.
    """
    percent = device.limit.percent if device.on_cpu else None
    return 1.0 if percent is None else percent / 100


def _framework_limit(framework: str, device: Device) -> int | None:
    """Return the memory limit in bytes that the framework itself must enforce, or None."""
    # the memory of CPU slices in TensorFlow and PyTorch is capped from outside
    own_memory = find_backend(device.kind).own_memory
    return device.limit.memory_bytes if own_memory or framework == "none" else None


class RankMap(msgspec.Struct, frozen=True):
    """Which device each rank of a layout uses, and how many CPU cores each rank keeps busy."""

    # in rank order or, for one child over several devices, in the order of its devices
    positions: tuple[int, ...]
    one_process: bool = False  # a single child for all positions
    own_cores: bool = False  # CPU slices: a rank's compute time is known from its CPU time
    threads: int = 1  # number of threads of each rank
    busy_cores: tuple[float, ...] = ()  # number of cores that each rank's step keeps busy

    @property
    def unique_positions(self) -> tuple[int, ...]:
        """Positions of the devices, without duplicates."""
        return tuple(dict.fromkeys(self.positions))


USED = 0.92  # fraction of a GPU's memory that all children together may hold
# GPU memory that the driver's context of each process takes in addition to the allocator
CONTEXT_BYTES = 600 << 20
KEPT = 1.4  # memory that an allocator keeps, free blocks included, relative to its peak in use
LOW_HOST_BYTES = 1 << 30  # all other idle children are killed if a host has less memory left

HeldBytes = Mapping[Layout, Mapping[int, int]]  # group -> position -> peak bytes


class MemoryBudget:
    """Estimates whether idle probe processes leave enough memory for the next probes.

    `available_bytes` is a function that returns the free memory of the host that has the least.
    """

    def __init__(self, devices: Sequence[Device], available_bytes: Callable[[], int]) -> None:
        self._devices = devices
        self._available_bytes = available_bytes
        self._peaks: dict[int, dict[int, int]] = {}
        self._short: dict[int, int] = {}

    def estimate_held(self, position: int, peak_bytes: int) -> int:
        """Estimate how many bytes an idle process keeps, from the peak memory of its steps.

        It may be more than the peak, because allocators keep free blocks.
        """
        return (
            round(peak_bytes * KEPT)
            if find_backend(self._devices[position].kind).own_memory
            else peak_bytes
        )

    def usable_bytes(self, position: int) -> int:
        """Return the usable memory of a device in bytes, or 0 if it is unknown."""
        return self._devices[position].usable_memory_bytes or 0

    def record_held(self, position: int, rows: int, held_bytes: int) -> None:
        """Record the bytes that an idle process holds on a device after passes of `rows` rows."""
        self._peaks.setdefault(position, {})[rows] = held_bytes

    def record_taken(self, position: int, taken_bytes: int) -> None:
        """Record how many bytes of a device's usable memory other programs hold."""
        self._short[position] = taken_bytes

    def groups_to_end(self, probes: Sequence[Probe], held_bytes: HeldBytes) -> list[Layout]:
        """Return the idle groups of processes that must be ended before the next probes can run.

        `held_bytes` says how many bytes each group holds on its devices. A group is identified by
        its layout without sizes (`Layout.group_key`).
        """
        wanted = {probe.layout.group_key for probe in probes}
        others = [key for key in held_bytes if key not in wanted]
        if others and self._available_bytes() < LOW_HOST_BYTES:
            return others
        needs = self._needs(probes)
        tight = {
            position
            for position, need in needs.items()
            if self._lacks_memory(position, need, wanted, held_bytes)
        }
        return [key for key in others if tight.intersection(key.active)]

    def _needs(self, probes: Sequence[Probe]) -> dict[int, int | None]:
        needs: dict[int, int | None] = {}
        for probe in probes:
            layout = probe.layout
            for position in layout.active:
                most = (
                    None
                    if layout.traits.sharded
                    else self._estimate_need(position, layout.pass_rows[position])
                )
                needs[position] = None if most is None else most * layout.processes
        return needs

    def _estimate_need(self, position: int, rows: int) -> int | None:
        """Estimate the bytes that a pass with this many rows needs, from passes of other sizes.

        Returns None if no pass was measured.
        """
        peaks = self._peaks.get(position, {})
        # the memory held for other passes grows at most in proportion to the rows
        return min(
            (round(size * max(1.0, rows / seen)) for seen, size in peaks.items()), default=None
        )

    def _lacks_memory(
        self, position: int, need: int | None, next_groups: set[Layout], held_bytes: HeldBytes
    ) -> bool:
        """Return whether a GPU has too little memory for the next probe because of idle processes.

        `need` is what the probe needs, in bytes; None means unknown. `next_groups` are the groups
        of processes that the next probes use, and `held_bytes` is the memory that each group holds.
        """
        device = self._devices[position]
        if not find_backend(device.kind).own_memory:
            return False  # each slice has its own memory cap
        usable = device.usable_memory_bytes
        if need is None or usable is None:
            # an unknown need counts as the whole memory
            return True
        held = {key: sizes[position] for key, sizes in held_bytes.items() if position in sizes}
        # the next probes reuse `next_groups`, with the memory that these hold
        own = max((size for key, size in held.items() if key in next_groups), default=0)
        others = sum(size + CONTEXT_BYTES for key, size in held.items() if key not in next_groups)
        return max(need, own) + others > USED * (usable - self._short.get(position, 0))
