"""Exchange costs according to a known link, before a split has shown them."""

from __future__ import annotations

from typing import Any

import pytest

from evener.balancer.search.model.link_time import all_reduce_seconds, shard_pass_seconds
from evener.balancer.search.search import Search
from evener.balancer.types import KnownLink, Layout, Probe, Stage, layout_of, solo
from tests.support.search_machines import Bench, searched

MB = 1_000_000
LINK = KnownLink(2, 1e9, 1e-3)  # 1 GB/s
SPLIT = layout_of((500, 500))


def test_a_ring_sends_less_than_twice_the_gradients_over_each_link() -> None:
    assert all_reduce_seconds(100 * MB, 1, LINK) == 0.0
    assert all_reduce_seconds(100 * MB, 2, LINK) == pytest.approx(0.1 + 0.001)
    assert all_reduce_seconds(100 * MB, 4, LINK) == pytest.approx(0.15 + 0.003)
    assert all_reduce_seconds(100 * MB, 2, KnownLink(2, 0.0)) == 0.0, "unknown"


def test_a_pass_of_shards_gathers_twice_and_reduces_once() -> None:
    """Each of these sends 50 MB between two ranks."""
    assert shard_pass_seconds(100 * MB, 2, LINK) == pytest.approx(0.15)


FOUR = Bench(((0.0, 0.1, 0, 4000), (0.0, 0.1, 0, 4000), (0.0, 1.0, 0, 4000), (0.0, 1.0, 0, 4000)))
PAIR = Bench(((0.0, 0.1, 0, 4000),) * 2, 0.002)


def list_splits(bench: Bench, **options: Any) -> list[Layout]:
    """Return the splits that a search explores, in order; a global batch has 1000 rows."""
    _, seen = searched(bench, bench.problem(global_batch=1000, **options))
    return [one.probe.layout for one in seen if one.probe.stage == Stage.SPLIT]


def test_slow_devices_are_left_out_if_a_slow_link_costs_more_than_they_save() -> None:
    """Two of the four devices have a tenth of the speed, and save 5 of 50 ms if an exchange costs
    nothing.

    Over the link, it takes 200 ms between two and 300 ms between four.
    """
    first, *_ = list_splits(FOUR)
    assert len(first.active) == 4
    first, *_ = list_splits(FOUR, link=LINK, gradient_bytes=200 * MB)
    assert first.active == (0, 1)


def test_a_predicted_step_has_what_the_link_takes_and_computing_does_not_hide() -> None:
    """Each device computes for 50 ms of a step alone, and hides at most two thirds of it."""
    search = Search(PAIR.problem(global_batch=1000, link=LINK, gradient_bytes=100 * MB))
    for one in PAIR.measure([Probe(solo(2, i, 500), Stage.SOLO, 1.0) for i in range(2)]):
        search.tell(one)
    machine = search.evaluation.machine
    assert machine.exchange_seconds((0, 1)) == pytest.approx(0.101 - 0.05 * 2 / 3, rel=0.01)
    assert machine.predicted_rate(SPLIT) == pytest.approx(1000 / (0.05 + 0.0677), rel=0.01)
    assert machine.sync_seconds is None, "nothing was measured"


@pytest.mark.parametrize("gradient_bytes", [0, MB, 30 * MB])
def test_an_exchange_that_computing_hides_changes_nothing(gradient_bytes: int) -> None:
    assert list_splits(PAIR, link=LINK, gradient_bytes=gradient_bytes) == list_splits(PAIR)


def test_a_measured_split_overrules_the_link() -> None:
    """The exchange takes 2 ms of a step, though the link predicts over 200 ms."""
    search, _ = searched(PAIR, PAIR.problem(global_batch=1000, link=LINK, gradient_bytes=300 * MB))
    assert search.evaluation.machine.exchange_seconds((0, 1)) == pytest.approx(0.002, abs=1e-4)
    best = search.best()
    assert best is not None
    assert best.layout == SPLIT


def test_shards_exchange_their_parameters_in_each_pass() -> None:
    """1000 rows are two passes of 250 on each of two devices, which hide all of their work."""
    bench = Bench(((0.0, 0.1, 0, 250),) * 2)
    problem = bench.problem(
        global_batch=1000, all_together=True, link=LINK, parameter_bytes=200 * MB
    )
    search = Search(problem)
    sizes = [solo(2, i, size) for size in (8, 250) for i in range(2)]
    for one in bench.measure([Probe(each, Stage.SOLO, 1.0) for each in sizes]):
        search.tell(one)
    exchange_s = search.evaluation.machine.exchange_seconds((0, 1))
    assert exchange_s == pytest.approx(2 * 0.3 - 0.05, rel=0.05)
