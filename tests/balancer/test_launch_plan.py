"""Which children a layout gets, what they build, and which idle ones are killed for their memory.

The GPUs don't exist.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from evener.balancer.families import pack_on
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.launch_plan import (
    CONTEXT_BYTES,
    MemoryBudget,
    assign_devices,
    build_commands,
    choose_engine,
    map_ranks,
    reserve_free_ports,
    runs_in_one_process,
)
from evener.balancer.probes.protocol import Build
from evener.balancer.request import Job, Request
from evener.balancer.types import Layout, Probe, Stage, Timed, layout_of, solo
from evener.devices.backend import ChildEnvironment
from evener.devices.cpu import available_memory_bytes
from evener.devices.registry import child_environment
from evener.devices.types import Device, Limit
from tests.support.probe_children import list_probe_children
from tests.support.probers import child_prober

MIB = 1 << 20
FREE = Limit()
CAPPED = Limit(memory_bytes=100 * MIB)


def gpu(index: int, limit: Limit = FREE, memory_bytes: int = 1000 * MIB) -> Device:
    """Return a GPU that exists only by name."""
    return Device(f"GPU-{index}", index, "H200", "gpu", memory_bytes, (), limit)


def resolved_for(framework: str, *devices: Device) -> Job:
    """Return a request for some workload on these devices."""
    return Job(Request(), devices, "some workload", framework)


def commands(framework: str, layout: Layout, *devices: Device) -> list[Build]:
    """Return the build command of each child of a layout."""
    resolved, key = resolved_for(framework, *devices), layout.group_key
    assigned = assign_devices(resolved, key)
    environments = [child_environment(group, framework) for group in assigned]
    grouped = layout.kind == "split" and len(assigned) > 1
    peers = (
        tuple(f"127.0.0.1:{port}" for port in reserve_free_ports(len(assigned))) if grouped else ()
    )
    return build_commands(
        resolved, key, assigned, environments, map_ranks(resolved, key, environments, {}), peers
    )


SPLIT = layout_of((8, 8))


@pytest.mark.parametrize(
    ("framework", "limits", "engine"),
    [
        ("tensorflow", (FREE, FREE), "towers"),
        ("tensorflow", (FREE, CAPPED), "multiworker"),
        ("torch", (FREE, FREE), "ddp"),
    ],
)
def test_how_a_split_is_kept_in_step(
    framework: str, limits: tuple[Limit, Limit], engine: str
) -> None:
    """One TensorFlow process drives free GPUs. Limited GPUs, and PyTorch, have one process each."""
    resolved = resolved_for(framework, gpu(0, limits[0]), gpu(1, limits[1]))
    assert choose_engine(resolved, SPLIT.group_key) == engine
    assert runs_in_one_process(resolved, SPLIT.group_key) == (engine == "towers")
    assert choose_engine(resolved, solo(2, 0, 8).group_key) == ""


def test_the_ranks_of_a_group_have_peers_and_their_own_limits() -> None:
    """All have the same peers, each its own rank and cap.

    Each rank's GPU is its number 0. A device that is left out has no rank.
    """
    found = commands("torch", layout_of((8, 0, 8)), gpu(0), gpu(1), gpu(2, CAPPED))
    assert [command.setup.rank for command in found] == [0, 1]
    assert found[0].setup.peers == found[1].setup.peers
    assert len(set(found[0].setup.peers)) == 2
    assert [command.setup.devices for command in found] == [("cuda:0",), ("cuda:0",)]
    assert [command.setup.memory_limit_bytes for command in found] == [(None,), (100 * MIB,)]


def test_towers_are_one_child_that_sees_every_gpu_and_knobs_change_the_build() -> None:
    """The child's devices are in the order of the request, without peers."""
    (command,) = commands(
        "tensorflow", Layout("split", (8, 8), knobs=("xla", "mixed")), gpu(0), gpu(1)
    )
    assert command.setup.devices == ("GPU:0", "GPU:1")
    assert command.setup.peers == ()
    assert command.setup.xla
    assert command.setup.precision == "mixed_bfloat16"


def test_a_pack_is_as_many_children_without_a_group() -> None:
    """Each is alone on the same device."""
    found = commands("torch", Layout("pack", (0, 8), 3), gpu(0), gpu(1))
    assert len(found) == 3
    assert {command.setup.peers for command in found} == {()}
    resolved, key = resolved_for("torch", gpu(0), gpu(1)), Layout("pack", (0, 8), 3).group_key
    environments = [child_environment(group, "torch") for group in assign_devices(resolved, key)]
    assert map_ranks(resolved, key, environments, {}).positions == (1, 1, 1)


def test_layouts_that_need_other_children_have_other_keys() -> None:
    """Devices, kind, processes, placement and knobs matter; sizes don't."""
    assert layout_of((8, 4)).group_key == layout_of((2, 90)).group_key
    different = {
        layout_of((8, 4)).group_key,
        layout_of((8, 0)).group_key,
        Layout("pack", (8, 0), 2).group_key,
        Layout("place", (8, 4), 1, "halves").group_key,
        Layout("split", (8, 4), knobs=("xla",)).group_key,
    }
    assert len(different) == 5


def test_ports_are_free_and_different() -> None:
    """All are held open until the last is found."""
    assert len(set(reserve_free_ports(8))) == 8


def test_a_port_is_reserved_until_its_server_begins() -> None:
    """A server with SO_REUSEADDR gets it, and no program that requests any port does."""
    (port,) = reserve_free_ports(1)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


@pytest.fixture
def crowd() -> Iterator[ChildProber]:
    """Yield two GPUs of 1000 MiB besides one context. Trainings use 4 MiB a sample, and may hold
    5.6.
    """
    settings: dict[str, Any] = {
        "memory_per_sample_mib": 4.0,
        "memory_base_mib": 0.0,
        "base_ms": 2.0,
    }
    devices = tuple(gpu(i, memory_bytes=1000 * MIB + round(CONTEXT_BYTES / 0.92)) for i in range(2))
    prober = child_prober(devices, **settings)
    yield prober
    prober.close()


def measure(prober: ChildProber, layout: Layout) -> Timed:
    """Return a short probe."""
    stage: Stage = Stage.SOLO if layout.kind == "solo" else Stage.SPLIT
    (seen,) = prober.measure((Probe(layout, stage, 0.1),), lambda _: None, threading.Event())
    assert isinstance(seen, Timed), seen
    return seen


def pids() -> set[int]:
    """Return the pids of the living children."""
    return {one.pid for one in list_probe_children()}


def test_idle_children_stay_where_all_fit_and_end_where_they_would_not(crowd: ChildProber) -> None:
    """The memory that a probe may hold is bounded by what others held for similar sizes."""
    measure(crowd, solo(2, 0, 20))
    measure(crowd, solo(2, 1, 20))
    alone = pids()
    assert len(alone) == 2
    measure(crowd, layout_of((20, 10)))  # 112 MiB and 112 MiB
    assert alone < pids()
    assert len(pids()) == 4
    measure(crowd, layout_of((130, 10)))  # at most 728 MiB and 112 MiB of 920: all stay
    assert alone < pids()
    measure(crowd, solo(2, 0, 60))  # 336 MiB besides the group, which released its 728
    assert len(pids()) == 4
    # at most 952 MiB, which is all of the first GPU, so its other child is killed
    measure(crowd, layout_of((170, 10)))
    assert len(pids()) == 3


def test_with_nothing_known_idle_children_go(crowd: ChildProber) -> None:
    """A first split over a device that never ran may need all of its memory."""
    budget, split, alone = (
        MemoryBudget(crowd._devices, available_memory_bytes),
        Probe(layout_of((1, 1)), Stage.SPLIT, 0.1),
        solo(2, 0, 1).group_key,
    )
    budget.record_held(0, 1, 4 * MIB)
    assert budget.groups_to_end((split,), {alone: {0: 4 * MIB}}) == []
    other = solo(2, 1, 1).group_key
    assert budget.groups_to_end((split,), {alone: {0: 4 * MIB}, other: {1: 4 * MIB}}) == [other]


def test_idle_children_go_where_others_hold_the_memory(crowd: ChildProber) -> None:
    """What would fit beside them on an empty device doesn't fit on a half-full one."""
    budget, key = MemoryBudget(crowd._devices, available_memory_bytes), layout_of((1, 1)).group_key
    budget.record_held(0, 100, 400 * MIB)
    probe, idle = Probe(solo(2, 0, 100), Stage.SOLO, 0.1), {key: {0: 400 * MIB, 1: MIB}}
    assert budget.groups_to_end((probe,), idle) == []
    budget.record_taken(0, 500 * MIB)
    assert budget.groups_to_end((probe,), idle) == [key]


def test_idle_children_go_if_their_allocator_may_hold_all_memory(crowd: ChildProber) -> None:
    """They go for children of another layout, but go on with probes of their own.

    TensorFlow's allocator doesn't report what it keeps after it ran out of memory.
    """
    budget, own = MemoryBudget(crowd._devices, available_memory_bytes), solo(2, 0, 100)
    budget.record_held(0, 100, 4 * MIB)
    budget.record_held(1, 100, 4 * MIB)
    idle = {own.group_key: {0: budget.usable_bytes(0)}}
    split = Probe(layout_of((100, 100)), Stage.SPLIT, 0.1)
    assert budget.groups_to_end((split,), idle) == [own.group_key]
    assert budget.groups_to_end((Probe(own, Stage.SOLO, 0.1),), idle) == []
    assert budget.groups_to_end((Probe(solo(2, 1, 100), Stage.SOLO, 0.1),), idle) == []


def test_trainings_of_a_pack_share_the_hosts_cores() -> None:
    """Each knows how many there are, because more threads than cores would slow all of them.

    The ranks of a split know it anyway.
    """
    pack = pack_on(solo(1, 0, 8), 5)
    assert [command.setup.trainings for command in commands("torch", pack, gpu(0))] == [5] * 5
    assert [command.setup.trainings for command in commands("torch", SPLIT, gpu(0), gpu(1))] == [
        1,
        1,
    ]


def test_a_slowed_rank_and_its_own_work_go_by_the_cores_that_its_step_kept_busy_alone() -> None:
    """They are known from its solo probe, or else its threads count. The build command has them."""
    wide = Device("cpu-0-of-1", 0, "CPU", "cpu", None, tuple(range(4)), Limit(percent=50.0))
    resolved, key = resolved_for("none", wide, wide), SPLIT.group_key
    environments = [ChildEnvironment({}, threads=4)] * 2
    ranks = map_ranks(resolved, key, environments, {1: 2.5})
    assert ranks.busy_cores == (4.0, 2.5)
    found = build_commands(resolved, key, assign_devices(resolved, key), environments, ranks)
    assert [(command.parallelism, command.compute) for command in found] == [(4.0, 0.5), (2.5, 0.5)]
