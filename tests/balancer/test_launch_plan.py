"""Which children a layout gets, what they are told, and who has to go for their memory; on GPUs that aren't here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.launch_plan import (
    Job,
    Key,
    engine_of,
    free_ports,
    groups_of,
    key_of,
    one_child,
    orders_of,
    stand_of,
)
from evener.balancer.probes.memory_budget import CONTEXT_BYTES, Room
from evener.balancer.probes.protocol import Build
from evener.balancer.types import Layout, Probe, Timed, layout_of, solo
from evener.devices.child_environment import ChildEnvironment, child_environment
from evener.devices.types import Device, Limit

MIB = 1 << 20
FREE = Limit()
CAPPED = Limit(memory_bytes=100 * MIB)


def gpu(index: int, limit: Limit = FREE, memory_bytes: int = 1000 * MIB) -> Device:
    """A GPU by name only."""
    return Device(f"GPU-{index}", index, "H200", "gpu", memory_bytes, (), limit)


def orders(framework: str, layout: Layout, *devices: Device) -> list[Build]:
    """What the children of a layout are told."""
    job, key = Job(devices, "some workload", framework), key_of(layout)
    groups = groups_of(job, key)
    environments = [child_environment(group, framework) for group in groups]
    return orders_of(job, key, groups, environments, stand_of(job, key, environments, {}))


SPLIT = layout_of((8, 8))


@pytest.mark.parametrize(
    ("framework", "limits", "engine"),
    [
        ("tensorflow", (FREE, FREE), "towers"),
        ("tensorflow", (FREE, CAPPED), "multiworker"),
        ("torch", (FREE, FREE), "ddp"),
    ],
)
def test_how_a_split_is_kept_in_step(framework: str, limits: tuple[Limit, Limit], engine: str) -> None:
    """One TensorFlow process drives free GPUs; limited ones and PyTorch have a process each."""
    job = Job((gpu(0, limits[0]), gpu(1, limits[1])), "some workload", framework)
    assert engine_of(job, key_of(SPLIT)) == engine
    assert one_child(job, key_of(SPLIT)) == (engine == "towers")
    assert engine_of(job, key_of(solo(2, 0, 8))) == ""


def test_a_group_is_told_ranks_peers_and_limits() -> None:
    """Every rank the same peers, each its own rank and cap; its one GPU is number 0 to it; who is left out isn't in."""
    told = orders("torch", layout_of((8, 0, 8)), gpu(0), gpu(1), gpu(2, CAPPED))
    assert [order.place.rank for order in told] == [0, 1]
    assert told[0].place.peers == told[1].place.peers
    assert len(set(told[0].place.peers)) == 2
    assert [order.place.devices for order in told] == [("GPU:0",), ("GPU:0",)]
    assert [order.place.memory_limit_bytes for order in told] == [(None,), (100 * MIB,)]


def test_towers_are_one_child_that_sees_every_gpu_and_knobs_change_the_build() -> None:
    """In the order of the request; no peers."""
    (order,) = orders("tensorflow", Layout("split", (8, 8), knobs=("xla", "mixed")), gpu(0), gpu(1))
    assert order.place.devices == ("GPU:0", "GPU:1")
    assert order.place.peers == ()
    assert order.place.xla
    assert order.place.precision == "mixed_bfloat16"


def test_a_pack_is_as_many_children_without_a_group() -> None:
    """Each alone on the same device."""
    told = orders("torch", Layout("pack", (0, 8), 3), gpu(0), gpu(1))
    assert len(told) == 3
    assert {order.place.peers for order in told} == {()}
    job, key = Job((gpu(0), gpu(1)), "some workload", "torch"), key_of(Layout("pack", (0, 8), 3))
    stand = stand_of(job, key, [child_environment(group, "torch") for group in groups_of(job, key)], {})
    assert stand.positions == (1, 1, 1)


def test_layouts_that_need_other_children_have_other_keys() -> None:
    """Devices, kind, processes, placement and knobs; not the sizes."""
    assert key_of(layout_of((8, 4))) == key_of(layout_of((2, 90)))
    different = {
        key_of(layout_of((8, 4))),
        key_of(layout_of((8, 0))),
        key_of(Layout("pack", (8, 0), 2)),
        key_of(Layout("place", (8, 4), 1, "halves")),
        key_of(Layout("split", (8, 4), knobs=("xla",))),
    }
    assert len(different) == 5
    assert isinstance(next(iter(different)), Key)


def test_ports_are_free_and_different() -> None:
    """All held open until the last is found."""
    assert len(set(free_ports(8))) == 8


@pytest.fixture
def crowd() -> Iterator[ChildProber]:
    """Two GPUs of 1000 MiB beside one context, whose trainings use 4 MiB a sample, and may hold 5.6."""
    settings: dict[str, Any] = {"memory_per_sample_mib": 4.0, "memory_base_mib": 0.0, "base_ms": 2.0}
    devices = tuple(gpu(i, memory_bytes=1000 * MIB + round(CONTEXT_BYTES / 0.92)) for i in range(2))
    prober = ChildProber(Job(devices, "synthetic", "none", settings))
    yield prober
    prober.close()


def measure(prober: ChildProber, layout: Layout) -> Timed:
    """A short probe."""
    stage = "solo" if layout.kind == "solo" else "split"
    (seen,) = prober.measure((Probe(layout, stage, 0.1),), lambda _: None, threading.Event())
    assert isinstance(seen, Timed), seen
    return seen


def pids() -> set[int]:
    """The living children."""
    return {one.pid for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE}


def test_idle_children_stay_where_all_fit_and_go_where_they_would_not(crowd: ChildProber) -> None:
    """What a coming probe may hold is bounded by what others held for as much or less."""
    measure(crowd, solo(2, 0, 20))
    measure(crowd, solo(2, 1, 20))
    alone = pids()
    assert len(alone) == 2
    measure(crowd, layout_of((20, 10)))  # 112 MiB beside 112 MiB
    assert alone < pids()
    assert len(pids()) == 4
    measure(crowd, layout_of((130, 10)))  # 728 MiB at most beside 112 MiB, of 920: all stay
    assert alone < pids()
    measure(crowd, solo(2, 0, 60))  # 336 MiB beside the 728 of the group, which holds its peak
    assert len(pids()) == 2


def test_with_nothing_known_idle_children_go(crowd: ChildProber) -> None:
    """A first split over a device that never ran may need everything of it."""
    room, split, alone = Room(crowd._job.devices), Probe(layout_of((1, 1)), "split", 0.1), key_of(solo(2, 0, 1))
    room.learn(0, 1, 4 * MIB)
    assert room.too_many((split,), {alone: {0: 4 * MIB}}) == []
    other = key_of(solo(2, 1, 1))
    assert room.too_many((split,), {alone: {0: 4 * MIB}, other: {1: 4 * MIB}}) == [other]


def test_idle_children_go_where_others_hold_the_memory(crowd: ChildProber) -> None:
    """What would fit beside them on an empty device does not on one that is half taken."""
    room, key = Room(crowd._job.devices), key_of(layout_of((1, 1)))
    room.learn(0, 100, 400 * MIB)
    probe, idle = Probe(solo(2, 0, 100), "solo", 0.1), {key: {0: 400 * MIB, 1: MIB}}
    assert room.too_many((probe,), idle) == []
    room.shrink(0, 500 * MIB)
    assert room.too_many((probe,), idle) == [key]


def test_a_slowed_rank_and_its_own_work_go_by_the_cores_that_its_step_kept_busy_alone() -> None:
    """Known from its solo probe, else its threads; the order to build carries it."""
    wide = Device("cpu-0-of-1", 0, "CPU", "cpu", None, tuple(range(4)), Limit(percent=50.0))
    job, key = Job((wide, wide), "some workload", "none"), key_of(SPLIT)
    groups = groups_of(job, key)
    environments = [ChildEnvironment({}, threads=4)] * 2
    stand = stand_of(job, key, environments, {1: 2.5})
    assert stand.busy_cores == (4.0, 2.5)
    told = orders_of(job, key, groups, environments, stand)
    assert [(order.parallelism, order.compute) for order in told] == [(4.0, 0.5), (2.5, 0.5)]
