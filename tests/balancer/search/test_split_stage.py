"""Which splits exploration measures, and when it has enough of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.search import Search
from evener.balancer.types import Failed, Layout, Observation, Probe, Stage, Timed, solo
from tests.support import machine_families_hard as hard
from tests.support import search_trials as trials
from tests.support.recording_prober import run_search
from tests.support.search_machines import Bench, noisy, searched

PAIR = Bench(((10.0, 0.1, 0, 4000), (12.0, 0.16, 0, 4000)), 0.002)
EQUAL = Bench(((10.0, 0.1, 0, 4000), (10.0, 0.1, 0, 4000)), 0.002)
THREE = Bench(((10.0, 0.1, 0, 4000), (12.0, 0.16, 0, 4000), (30.0, 0.3, 0, 2000)), 0.01)


def test_splits_that_fail_are_given_up_after_the_second() -> None:
    """Each failure names another device, as if the network fails. Every attempt may take
    minutes.
    """
    bench = Bench(((10.0, 0.1, 0, 4000),) * 6, 0.002)
    search, failed = Search(bench.problem(global_batch=1000)), set[Layout]()

    def measure(probe: Probe) -> Observation:
        if probe.stage == Stage.SPLIT:
            failed.add(probe.layout)
            return Failed(probe, "raised", "no route to host", probe.layout.active[:1], 1.0)
        return bench.measure([probe])[0]

    run_search(search, lambda probes: [measure(probe) for probe in probes])
    assert len(failed) == 2
    best = search.best()
    assert best is not None
    assert best.layout.kind == "solo"


def test_a_device_alone_that_the_budget_is_too_short_for_keeps_no_split_from_being_measured() -> (
    None
):
    """2000 rows take 20 s on one device, and half of that on both."""
    bench = Bench(((10.0, 10.0, 0, 4000),) * 2, 0.002)
    search, seen = Search(bench.problem(global_batch=2000, budget_seconds=200.0)), list[Probe]()

    def measure(probes: Sequence[Probe]) -> list[Observation]:
        seen.extend(probes)
        steps = [(one, bench.step(one.probe.layout)) for one in bench.measure(probes)]
        found = [(one, (14 if one.probe.seconds >= step else 2) * step) for one, step in steps]
        return [msgspec.structs.replace(one, elapsed_seconds=seconds) for one, seconds in found]

    run_search(search, measure)
    assert "split" in {probe.layout.kind for probe in seen}


def test_a_device_alone_whose_steps_may_take_most_of_the_budget_comes_after_the_splits() -> None:
    """Two steps in passes take 43 of the 80 s left, and no split would follow.

    The device has a third of the samples/s.
    """
    (case,) = hard.cases("passes_dear", 96_002)
    assert trials.run(case.machine, case.ask, case.seed).regret <= 0.03


def test_one_device_is_measured_at_rest_only_if_it_may_beat_the_best_split() -> None:
    """It isn't measured if it may only be faster than the slowest split."""
    search = Search(PAIR.problem(tolerance=0.0))
    alone = [solo(2, i, batch) for batch in (8, 64, 4000) for i in (0, 1)]
    splits = [Layout("split", shares) for shares in ((20, 10), (4000, 2450))]
    probes = [Probe(layout, Stage.SOLO, 4.0, turn // 2) for turn, layout in enumerate(alone)]
    probes += [Probe(layout, Stage.SPLIT, 6.0, turn) for turn, layout in enumerate(splits)]
    for one in PAIR.measure(probes):
        search.tell(one)
    assert PAIR.rate(splits[0]) < PAIR.rate(alone[-2]) < PAIR.rate(splits[1]) / 1.3
    assert not any(probe.stage == Stage.REST for probe in search.ask())


@pytest.mark.parametrize("seed", range(3))
def test_each_of_several_devices_is_measured_at_rest_once(seed: int) -> None:
    """Noise that favours another batch doesn't lead to a second measurement.

    With expensive splits, all of the time would be spent on those.
    """
    _, seen = noisy(Bench(PAIR.devices, 1.0), 0.08, seed, max_global_batch=1500)
    rested = [one.probe.layout.active for one in seen if one.probe.stage == Stage.REST]
    assert rested
    assert len(set(rested)) == len(rested)


def test_of_two_splits_that_no_measurement_tells_apart_the_one_that_raced_is_the_plan() -> None:
    """It doesn't matter how fast the other one seemed in exploration."""
    search, _ = searched(EQUAL, EQUAL.problem(global_batch=1000))
    best = search.best()
    assert best is not None
    assert best.layout.shares == (500, 500)
    (lucky,) = EQUAL.measure([Probe(Layout("split", (504, 496)), Stage.SPLIT, 6.0)], 0.97)
    assert isinstance(lucky, Timed)
    assert lucky.samples_per_second > best.throughput.value
    search.tell(lucky)
    assert search.best() == best


def test_the_best_single_device_is_certain_at_the_requested_batch_if_none_races() -> None:
    """A comparison of splits alone still has their gain over one device."""
    options = LayoutOptions(("even", "split"), scaling=False)
    search = run_search(Search(PAIR.problem(global_batch=1000), options), PAIR.measure)
    alone = search.evaluation.best_single()
    assert alone is not None
    assert alone.layout.shares == (1000, 0)
