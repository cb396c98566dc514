"""Which children a layout gets, what they are told, and who has to go for their memory; on GPUs that aren't here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from balancer.probes.pool import ChildProber, Job, Key, free_ports, key_of
from balancer.records import Layout, Probe, Timed, layout_of, solo
from devices.base import Device, Limit
from devices.environment import child_environment

MIB = 1 << 20
FREE = Limit()
CAPPED = Limit(memory_bytes=100 * MIB)


def gpu(index: int, limit: Limit = FREE, memory_bytes: int = 1000 * MIB) -> Device:
    """A GPU by name only."""
    return Device(f"GPU-{index}", index, "H200", "gpu", memory_bytes, (), limit)


def prober_of(framework: str, *devices: Device, **settings: Any) -> ChildProber:
    """A prober of a workload that needs no GPU, but believes in them."""
    return ChildProber(Job(devices, "synthetic", framework, settings))


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
    prober = prober_of(framework, gpu(0, limits[0]), gpu(1, limits[1]))
    assert prober.engine(key_of(SPLIT)) == engine
    assert prober.engine(key_of(solo(2, 0, 8))) == ""
    prober.close()


def test_a_group_is_told_ranks_peers_and_limits() -> None:
    """Every rank the same peers, each its own rank and cap; its one GPU is number 0 to it."""
    prober = prober_of("torch", gpu(0), gpu(1), gpu(2, CAPPED))
    key = key_of(layout_of((8, 0, 8)))
    groups = [[gpu(0)], [gpu(2, CAPPED)]]
    orders = prober._orders(key, groups, [child_environment(group, "torch") for group in groups], "ddp")
    assert [order.place.rank for order in orders] == [0, 1]
    assert orders[0].place.peers == orders[1].place.peers
    assert len(set(orders[0].place.peers)) == 2
    assert [order.place.devices for order in orders] == [("GPU:0",), ("GPU:0",)]
    assert [order.place.memory_limit_bytes for order in orders] == [(None,), (100 * MIB,)]
    prober.close()


def test_towers_are_one_child_that_sees_every_gpu_and_knobs_change_the_build() -> None:
    """In the order of the request; no peers."""
    prober = prober_of("tensorflow", gpu(0), gpu(1))
    layout = Layout("split", (8, 8), knobs=("xla", "mixed"))
    groups = [[gpu(0), gpu(1)]]
    (order,) = prober._orders(key_of(layout), groups, [child_environment(groups[0], "tensorflow")], "towers")
    assert order.place.devices == ("GPU:0", "GPU:1")
    assert order.place.peers == ()
    assert order.place.xla
    assert order.place.precision == "mixed_bfloat16"
    prober.close()


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
    """Two GPUs of 1000 MiB whose trainings hold 4 MiB a sample."""
    prober = prober_of("none", gpu(0), gpu(1), memory_per_sample_mib=4.0, memory_base_mib=0.0, base_ms=2.0)
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
    measure(crowd, layout_of((20, 10)))  # 80 MiB beside 80 MiB
    assert alone < pids()
    assert len(pids()) == 4
    measure(crowd, layout_of((200, 10)))  # 800 MiB at most beside 80 MiB, of 920: all stay
    assert alone < pids()
    measure(crowd, solo(2, 0, 60))  # 240 MiB beside the 800 of the group, which holds its peak
    assert len(pids()) == 2


def test_with_nothing_known_idle_children_go(crowd: ChildProber) -> None:
    """A first split may need everything."""
    measure(crowd, solo(2, 0, 1))
    before = pids()
    crowd._peaks.clear()
    measure(crowd, layout_of((1, 1)))
    assert not before & pids()
