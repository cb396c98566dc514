"""What the observations show about a machine.

It is which devices are left, limits, exchange costs, predicted rates, and equal shares.
"""

from __future__ import annotations

from typing import Any

import pytest

from evener.balancer.search.layouts import BALANCE, same_measurement
from evener.balancer.search.machine_model import MachineModel
from evener.balancer.search.observations import Observations
from evener.balancer.search.predictions import Predictions
from evener.balancer.search.time_left import TimeLeft
from evener.balancer.types import (
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Timed,
    layout_of,
    solo,
)
from tests.support.search_machines import Bench

BENCH = Bench(((10.0, 0.1, 0, 2000), (20.0, 0.2, 0, 2000)), 0.005)
SOLOS: tuple[tuple[Layout, Stage], ...] = tuple(
    (solo(2, i, batch), Stage.SOLO) for i in range(2) for batch in (8, 64, 500)
)
SPLIT = Layout("split", (400, 200))


def model(
    *layouts: tuple[Layout, Stage],
    extra: tuple[Observation, ...] = (),
    bench: Bench = BENCH,
    **options: Any,
) -> MachineModel:
    """Return the model after these layouts were measured."""
    problem = bench.problem(**options)
    seen = Observations(problem)
    turns: dict[Stage, int] = {}
    for layout, stage in layouts:
        turns[stage] = turns.get(stage, -1) + 1
        for one in bench.measure([Probe(layout, stage, 1.0, turns[stage])]):
            seen.add(one)
    for one in extra:
        seen.add(one)
    return read(problem, seen)


def read(problem: Problem, seen: Observations) -> MachineModel:
    """Return the model that a search makes of the observations."""
    return MachineModel(problem, seen, TimeLeft(problem, BALANCE, seen))


def test_the_cap_is_the_least_of_what_was_asked_in_whole_quanta() -> None:
    assert model().devices[0].requested_rows > 10**8
    assert model(largest_share=500, multiple_of=8).devices[0].requested_rows == 496
    assert model(max_global_batch=300, largest_share=500).devices[0].requested_rows == 300
    assert model(global_batch=600, largest_share=500).devices[0].requested_rows == 500


def test_a_device_that_is_full_at_the_smallest_share_is_left_out() -> None:
    full = OutOfMemory(Probe(solo(2, 1, 1), Stage.SOLO, 1.0), (1,), "full", 1.0)
    assert model(*SOLOS).live == (0, 1)
    assert model(*SOLOS, extra=(full,)).live == (0,)
    larger = OutOfMemory(Probe(solo(2, 1, 2), Stage.SOLO, 1.0), (1,), "full", 1.0)
    assert model(*SOLOS, extra=(larger,)).live == (0, 1)
    assert model(extra=(larger,), multiple_of=2, global_batch=8).live == (0,)


def test_passes_are_as_large_as_fits_unless_fewer_rows_were_clearly_faster() -> None:
    """1500 rows reach 98 % of the samples/s of 2000 rows, and larger passes save the cost of a
    pass.

    A full device has no passes.
    """
    larger: tuple[tuple[Layout, Stage], ...] = (
        (solo(2, 0, 1500), Stage.SOLO),
        (solo(2, 1, 1500), Stage.SOLO),
    )
    found = model(*SOLOS, *larger, global_batch=6000)
    assert [one.pass_rows for one in found.devices] == [one.guessed_rows for one in found.devices]
    assert min(one.guessed_rows for one in found.devices) > 1900
    full = OutOfMemory(Probe(solo(2, 1, 1), Stage.SOLO, 1.0), (1,), "full", 1.0)
    assert model(*SOLOS, extra=(full,), global_batch=6000).devices[1].pass_rows == 0
    falling = Bench(((0, 0, 0, 2000),) * 2, curves=(((0, 10), (500, 60), (2000, 400)),) * 2)
    fewer = model(*SOLOS, *larger, bench=falling, global_batch=6000)
    assert [one.pass_rows for one in fewer.devices] == [500, 500]


def test_a_rate_is_that_of_the_slowest_share_and_of_keeping_in_step() -> None:
    found = model(*SOLOS, (SPLIT, Stage.SPLIT))
    assert found.exchange[1][1:] == (pytest.approx(0.0), pytest.approx(0.005))
    assert found.sync_seconds == pytest.approx(0.005)
    assert found.predicted_rate(SPLIT) == pytest.approx(600 / 0.065, rel=1e-3)
    assert found.predicted_rate(Layout("split", (100, 300))) == pytest.approx(400 / 0.085, rel=1e-3)
    assert found.predicted_rate(solo(2, 0, 300)) == pytest.approx(300 / 0.04, rel=1e-3)
    assert model().predicted_rate(SPLIT) == 0.0
    assert model(*SOLOS[:3]).predicted_rate(SPLIT) == 0.0
    assert model(*SOLOS).sync_seconds is None


def test_what_slows_devices_in_splits_does_not_slow_one_alone() -> None:
    """Their own parts take 1.5 times as long in a split as alone."""
    (split,) = BENCH.measure([Probe(SPLIT, Stage.SPLIT, 1.0)], 1.5)
    found = model(*SOLOS, extra=(split,))
    assert found.predicted_rate(solo(2, 0, 300)) == pytest.approx(300 / 0.04, rel=1e-3)
    assert found.predicted_rate(SPLIT) == pytest.approx(600 / 0.0975, rel=0.01)


def test_splits_without_their_devices_own_times_cost_what_the_curves_leave() -> None:
    """The slower of the two would take 60 ms alone."""
    found = model(*SOLOS)
    (one,) = BENCH.measure([Probe(SPLIT, Stage.SPLIT, 1.0)])
    assert isinstance(one, Timed)
    unknown = Timed(
        one.probe,
        one.step_seconds,
        one.low_seconds,
        one.high_seconds,
        20,
        (None, None),
        (None, None),
        0.1,
        1.0,
    )
    assert model(*SOLOS, extra=(unknown,)).exchange[1][2] == pytest.approx(0.005, rel=0.02)
    assert found.splits == ()


def test_the_widest_split_says_what_exchange_costs_whichever_was_measured_last() -> None:
    three, two = Bench(((10.0, 0.1, 0, 4000),) * 3, 0.03), Bench(((10.0, 0.1, 0, 4000),) * 3, 0.02)
    probes = [
        Probe(layout_of(shares), Stage.SPLIT, 1.0) for shares in ((300, 300, 300), (400, 400, 0))
    ]
    seen = (*three.measure(probes[:1]), *two.measure(probes[1:]))
    for order in (seen, seen[::-1]):
        found = model(*((solo(3, i, 300), Stage.SOLO) for i in range(3)), extra=order, bench=three)
        assert found.sync_seconds == found.exchange[1][3]
        assert found.sync_seconds != found.exchange[1][2]


def test_what_safely_fits_ran_or_is_little_more() -> None:
    found = model(*SOLOS)
    assert found.is_sure_to_fit(Layout("split", (500, 500)))
    assert found.is_sure_to_fit(Layout("split", (625, 10)))
    assert not found.is_sure_to_fit(Layout("split", (640, 10)))
    assert not found.is_sure_to_fit(Layout("split", (10, 640)))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((100, 200), (100, 200), True),
        ((1000, 200), (1010, 200), True),
        ((1000, 200), (1011, 200), False),
        ((1000, 200), (1000, 203), False),
        ((1, 1000), (0, 1000), False),
        ((0, 1000), (0, 1001), True),
    ],
)
def test_layouts_within_a_little_are_one_measurement(
    one: tuple[int, int], other: tuple[int, int], same: bool
) -> None:
    assert same_measurement(Layout("split", one), Layout("split", other)) == same
    assert same_measurement(Layout("split", other), Layout("split", one)) == same


def test_the_same_shares_in_more_passes_are_another_measurement() -> None:
    at_once, in_passes = Layout("split", (100, 200)), Layout("split", (100, 200), micro=(100, 100))
    assert not same_measurement(at_once, in_passes)
    assert not same_measurement(in_passes, at_once)


def test_predictions_are_what_brute_force_finds() -> None:
    """Brute force tries all splits of a fixed batch, and every batch of one device.

    A device measured while the others were idle counts as measured.
    """
    found = model(*SOLOS, (SPLIT, Stage.SPLIT), global_batch=600)
    predicted = Predictions(found)
    split = predicted.fastest_split
    assert split is not None
    top = max(range(1, 600), key=lambda share: BENCH.rate(layout_of((share, 600 - share))))
    assert predicted.layout(split).shares == pytest.approx((top, 600 - top), abs=2)
    single = predicted.fastest_single
    assert single is not None
    assert predicted.layout(single) == solo(2, 0, 600)
    assert predicted.smallest_fast_enough(1.0) is None
    assert predicted.best_single_rate == pytest.approx(600 / 0.07, rel=1e-3)
    slow = Timed(
        Probe(solo(2, 0, 600), Stage.REST, 1.0),
        0.1,
        0.1,
        0.1,
        20,
        (7000, None),
        (0.1, None),
        0.1,
        1.0,
    )
    rested = model(*SOLOS, (SPLIT, Stage.SPLIT), extra=(slow,), global_batch=600)
    assert Predictions(rested).best_single_rate == pytest.approx(6000)
    quicker = Timed(
        Probe(solo(2, 0, 600), Stage.REST, 1.0, 1),
        0.09,
        0.09,
        0.09,
        20,
        (7000, None),
        (0.09, None),
        0.1,
        1.0,
    )
    for seen in ((slow, quicker), (quicker, slow)):
        rested = model(*SOLOS, (SPLIT, Stage.SPLIT), extra=seen, global_batch=600)
        assert rested.others_idle[0].step_seconds == 0.09, "the best of each"
