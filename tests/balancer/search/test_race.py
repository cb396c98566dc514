"""Which layouts race, in which order, and what the end of a race says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.observations import MOST_TURNS
from evener.balancer.search.ranking import LEAST_GAIN, ROUGH, compare_turns, throughput
from evener.balancer.search.search import Search
from evener.balancer.statistics import relative_half_width
from evener.balancer.types import (
    Failed,
    MeasurementDoubt,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Stop,
    Timed,
)
from evener.devices.machine import Machine, SimulatedDevice
from tests.support import machine_families, search_trials
from tests.support.recording_prober import run_search
from tests.support.search_machines import Bench, benches, noisy, searched

PAIR = Bench(((10.0, 0.1, 0, 4000), (12.0, 0.16, 0, 4000)), 0.002)
EQUAL = Bench(((10.0, 0.1, 0, 4000), (10.0, 0.1, 0, 4000)), 0.002)


def searched_with(
    bench: Bench, slower: Callable[[Probe], float], **options: Any
) -> tuple[Search, list[Observation]]:
    """Return a search in which `slower` prolongs each probe's steps, and its observations."""
    search, seen = Search(bench.problem(**options)), list[Observation]()
    while probes := search.ask():
        for probe in probes:
            (one,) = bench.measure([probe], slower(probe))
            seen.append(one)
            search.tell(one)
        assert len(seen) < 300, "the search does not end"
    return search, seen


@pytest.mark.parametrize(
    ("families", "why"), [(("solo", "split"), Stop.SETTLED), (("split",), Stop.ONLY_ONE)]
)
def test_a_race_of_two_is_decided_and_of_one_is_no_race(
    families: tuple[str, ...], why: Stop
) -> None:
    search = run_search(
        Search(PAIR.problem(global_batch=1000), LayoutOptions(families, scaling=False)),
        PAIR.measure,
    )
    assert len(search.evaluation.ranking()) == len(families)
    assert search.why_stopped() == why.value


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
def test_what_was_faster_than_all_that_raced_races_too(factor: float) -> None:
    """Everything is slower in the race.

    The fastest single device that was seen before takes part.
    """
    for seed in range(8):
        chance = random.Random(seed)
        bench = Bench(
            tuple(
                (chance.uniform(1, 40), chance.uniform(0.05, 1), 0, chance.randint(100, 3000))
                for _ in range(2)
            )
        )
        search, seen = searched_with(
            bench, lambda probe: factor if probe.stage == Stage.RACE else 1.0
        )
        singles = [
            one for one in seen if isinstance(one, Timed) and one.probe.layout.kind == "solo"
        ]
        before = [one for one in singles if one.probe.stage != Stage.RACE]
        fastest = max(before, key=lambda one: one.samples_per_second)
        assert fastest.probe.layout in {one.candidate.layout for one in search.evaluation.ranking()}


def test_the_first_turn_of_all_comes_before_the_second_of_any() -> None:
    """Turns run A B C A B C.

    A layout that exploration measured while nothing else ran has had its first turn.
    """
    _, seen = noisy(EQUAL, 0.1, 3, budget_seconds=120.0)
    turns = [one.probe.turn for one in seen if one.probe.stage == Stage.RACE]
    assert turns == sorted(turns)
    assert max(turns) >= 1
    for turn in range(1, max(turns) + 1):
        layouts = [
            one.probe.layout
            for one in seen
            if one.probe.stage == Stage.RACE and one.probe.turn == turn
        ]
        assert len(layouts) == len(set(layouts)) >= 2


def test_a_race_is_decided_only_if_no_rival_may_gain_what_matters() -> None:
    """The expected gain of a change decides, whatever the noise.

    Otherwise the search ends as tied, or without time left.
    """
    reasons = set()
    for seed in range(8):
        for deviation in (0.002, 0.02, 0.06):
            search, _ = noisy(PAIR, deviation, seed, tolerance=0.01, budget_seconds=200.0)
            why = search.why_stopped()
            reasons.add(why)
            race = search.evaluation.race
            leader = max(race.turns, key=lambda layout: throughput(race.turns[layout]).value)
            gains = [
                compare_turns(taken, race.turns[leader]).expected_gain()
                for layout, taken in race.turns.items()
                if layout != leader
            ]
            assert (why == Stop.SETTLED) == (max(gains) <= LEAST_GAIN), (why, max(gains))
    assert reasons == {Stop.SETTLED.value, Stop.TIED.value}


def test_one_device_with_one_layout_says_that_there_was_no_choice() -> None:
    search, _ = searched(bench := Bench(((10.0, 0.1, 0, 800),)), bench.problem(global_batch=256))
    assert search.why_stopped() == Stop.ONLY_ONE
    assert len(search.evaluation.ranking()) == 1


def test_a_budget_that_ends_the_search_is_the_reason() -> None:
    """It isn't the reason if some of the budget is left."""
    search, _ = searched(PAIR, PAIR.problem(budget_seconds=5.0))
    assert search.why_stopped() == Stop.BUDGET
    search, _ = searched(PAIR, PAIR.problem(budget_seconds=600.0))
    assert search.why_stopped() == Stop.SETTLED
    assert search._seen.spent_seconds() < 100


def test_a_fixed_batch_that_nothing_holds_is_the_reason() -> None:
    bench = Bench(((10.0, 0.1, 0, 300), (10.0, 0.1, 0, 300)))
    search, _ = searched(bench, bench.problem(global_batch=2000, micro=False))
    assert search.why_stopped() == Stop.NO_FIT
    assert search.best() is None


def test_devices_that_all_fail_are_the_reason_each_by_name() -> None:
    """A failure that names its device already isn't preceded by the name once more."""
    search = Search(PAIR.problem(labels=("GPU:0", "GPU:3")))
    died = "a child died", "GPU:3, starting: a child died"
    while probes := search.ask():
        for probe in probes:
            search.tell(
                Failed(probe, "exit", died[probe.layout.active[0]], probe.layout.active, 1.0)
            )
    assert (
        search.why_stopped()
        == "Every device failed: GPU:0: a child died; GPU:3, starting: a child died."
    )


def test_a_noisy_tie_ends_before_its_budget_and_is_called_one() -> None:
    """Two equal devices have 10 % of noise between probes.

    More turns wouldn't distinguish the leading layouts.
    """
    found = [noisy(EQUAL, 0.1, seed, budget_seconds=120.0)[0] for seed in range(8)]
    checks = [search._seen.spent_seconds(Stage.CHECK) for search in found]
    spent = sorted(
        search._seen.spent_seconds() - after for search, after in zip(found, checks, strict=True)
    )
    assert spent[4] < 90
    assert spent[-1] < 0.95 * 120
    ends = [search.why_stopped() for search in found]
    assert set(ends) <= {Stop.TIED, Stop.SETTLED}
    assert ends.count(Stop.TIED) >= 4
    for search in found:
        best = search.best()
        assert best is not None
        assert EQUAL.rate(best.layout) >= 0.9 * EQUAL.best()[0]


def test_a_layout_that_breaks_in_the_race_takes_no_more_turns() -> None:
    """It is neither ranked nor chosen."""
    options = LayoutOptions(("solo", "even", "split"), scaling=False)
    search, after = Search(PAIR.problem(tolerance=0.0), options), list[Probe]()
    broken = None
    while probes := search.ask():
        for probe in probes:
            if probe.layout == broken:
                after.append(probe)
            if probe.stage == Stage.RACE and broken is None:
                broken = probe.layout
                search.tell(OutOfMemory(probe, probe.layout.active[:1], "full", 1.0))
            else:
                search.tell(PAIR.measure([probe])[0])
    assert broken is not None
    assert not after
    assert broken not in {one.candidate.layout for one in search.evaluation.ranking()}
    best = search.best()
    assert best is not None
    assert best.layout != broken


@settings(max_examples=20, deadline=None)
@given(benches(), st.sampled_from([None, 10.0, 60.0]))
def test_no_device_is_probed_twice_alone_at_one_batch(bench: Bench, budget: float | None) -> None:
    """Whatever is still unknown, exploration doesn't measure a known time again."""
    for options in ({}, {"tolerance": 0.0}, {"global_batch": 8 * len(bench.devices)}):
        _, seen = searched(bench, bench.problem(budget_seconds=budget, **options))
        alone = [one.probe.layout for one in seen if one.probe.stage == Stage.SOLO]
        assert len(alone) == len(set(alone))


@settings(max_examples=20, deadline=None)
@given(
    benches(fewest=2, most=3),
    st.sampled_from([None, 4.0, 8.0, 15.0, 40.0]),
    st.booleans(),
    st.booleans(),
)
def test_the_answer_is_not_slower_than_anything_that_ran(
    bench: Bench, budget: float | None, fixed: bool, known: bool
) -> None:
    """Layouts are compared at the same global batch if it is fixed; otherwise the tolerance is
    allowed.
    """
    batch = 16 * len(bench.devices) if fixed else None
    search, seen = searched(bench, bench.problem(known, budget_seconds=budget, global_batch=batch))
    ran = [
        one
        for one in seen
        if isinstance(one, Timed)
        and one.probe.layout.global_batch == (batch or one.probe.layout.global_batch)
    ]
    best = search.best()
    if ran:
        assert best is not None
        fastest = max(one.samples_per_second for one in ran)
        assert best.throughput.value >= fastest * (1 - (0.01 if fixed else 0.026))


def test_a_problem_of_one_sample_has_an_answer() -> None:
    search = run_search(
        Search(Problem(1, (None,), global_batch=1)), Bench(((1.0, 1.0, 0, 5),)).measure
    )
    best = search.best()
    assert best is not None
    assert best.layout.shares == (1,)


def test_a_plan_s_figure_is_neither_too_high_nor_too_low_on_average() -> None:
    """With 5 % of noise between probes, the measurement that chose the layout is 2 % too high.

    It was the highest of many.
    """
    flattered, figures = [], []
    for seed in range(60):
        search, _ = noisy(PAIR, 0.05, seed, budget_seconds=60.0)
        best = search.best()
        assert best is not None
        truth = PAIR.rate(best.layout)
        figures.append(best.throughput.value / truth)
        flattered.append(throughput(search._seen.turns(best.layout)).value / truth)
    assert abs(fmean(figures) - 1) < 0.01
    assert fmean(flattered) - 1 > 0.02


def test_a_check_ends_the_race_of_a_free_batch_on_steady_devices() -> None:
    """An even split that ran isn't raced again with a larger batch, nor a winner with a smaller
    one.
    """
    for devices in (2, 4):
        machine = machine_families.machine("affine", devices, noise=0.01, seed=61001)
        assert search_trials.run(machine, search_trials.Ask()).seen[-1].probe.stage == Stage.CHECK


def test_a_layout_that_no_other_was_compared_with_is_not_checked() -> None:
    """Its samples/s aren't biased, because nothing was chosen by them."""
    bench = Bench(((10.0, 0.1, 0, 800),))
    _, seen = searched(bench, bench.problem(global_batch=1))
    assert {one.probe.stage for one in seen} == {"solo"}


@pytest.mark.parametrize("budget", [30.0, 60.0, None])
def test_what_was_chosen_among_several_is_measured_again(budget: float | None) -> None:
    """One check is enough if the samples/s are certain and everything else was measured.

    Only what the check shows may race after it.
    """
    search, seen = searched(PAIR, PAIR.problem(budget_seconds=budget))
    best, stages = search.best(), [one.probe.stage for one in seen]
    assert best is not None
    assert set(stages[stages.index(Stage.CHECK) :]) <= {Stage.CHECK, Stage.RACE}
    assert [one.probe.layout for one in seen if one.probe.stage == Stage.CHECK] == [best.layout]


@pytest.mark.parametrize(("deviation", "budget"), [(0.002, None), (0.05, None), (0.05, 200.0)])
def test_a_winner_is_measured_until_its_figure_is_within_five_percent(
    deviation: float, budget: float | None
) -> None:
    """Of two very different cards, the first wins at once.

    Its samples/s still have to become precise.
    """
    bench = Bench(((10.0, 0.1, 0, 4000), (1000.0, 10.0, 0, 4000)), 0.5)
    surer = 0
    for seed in range(8):
        search, seen = noisy(bench, deviation, seed, global_batch=256, budget_seconds=budget)
        best = search.best()
        assert best is not None
        assert best.layout.active == (0,)
        assert best.turns == 2 or deviation > 0.002
        spent = budget is not None and sum(one.elapsed_seconds for one in seen) > 0.9 * budget
        width = relative_half_width(best.throughput)
        # turns may differ so much by chance that all eight don't suffice
        hopeless = width > ROUGH * math.sqrt(MOST_TURNS / best.turns)
        assert width <= ROUGH or best.turns >= MOST_TURNS or spent or hopeless
        surer += width <= ROUGH
    assert surer >= 4


def test_a_figure_that_eight_turns_would_leave_rough_is_checked_once() -> None:
    """Steps differ by 30 %, so more turns cost half a minute and show as little."""
    bench = Bench(((10.0, 0.1, 0, 4000), (1000.0, 10.0, 0, 4000)), 0.5)
    for seed in range(5):
        _, seen = noisy(bench, 0.3, seed, global_batch=256, budget_seconds=200.0)
        assert [one.probe.stage for one in seen].count(Stage.CHECK) == 1


def check_roughly(
    bench: Bench, deviation: float, check: Callable[[Timed, int], Observation]
) -> tuple[Search, int]:
    """Return a search with steps that vary by `deviation`, and its number of checks.

    Each check's outcome is that of `check`, called with its measurement and its number from 0.
    """
    search, rough, checks = Search(bench.problem(global_batch=256)), random.Random(1), 0
    while probes := search.ask():
        for probe in probes:
            (one,) = bench.measure([probe], rough.lognormvariate(0, deviation))
            assert isinstance(one, Timed)
            seconds = one.step_seconds
            low, high = seconds * (1 - deviation), seconds * (1 + deviation)
            one = msgspec.structs.replace(one, low_seconds=low, high_seconds=high)
            is_check = probe.stage == Stage.CHECK
            search.tell(check(one, checks) if is_check else one)
            checks += is_check
        assert checks < 100, "the search does not end"
    return search, checks


ONE_AND_THREE = [Bench(((10.0, 0.1, 0, 4000),) * count, 0.5) for count in (1, 3)]


@pytest.mark.parametrize("bench", ONE_AND_THREE)
@pytest.mark.parametrize("deviation", [0.05, 0.3])
def test_a_check_that_fails_is_not_repeated_although_the_figure_is_rough(
    bench: Bench, deviation: float
) -> None:
    """Its processes end in each check, as in a training with an error in a later step."""

    def fail(seen: Timed, number: int) -> Failed:
        return Failed(seen.probe, "exit", "exit code 1", seen.probe.layout.active, 3.0)

    search, checks = check_roughly(bench, deviation, fail)
    assert 1 < checks < 20
    assert search.best() is not None


@pytest.mark.parametrize("bench", ONE_AND_THREE)
def test_checks_end_although_a_device_is_throttled_in_all_but_the_first(bench: Bench) -> None:
    """Such turns don't count, so the samples/s stay rough."""

    def throttle(seen: Timed, number: int) -> Timed:
        doubts = (MeasurementDoubt("throttled", 0.1, seen.probe.layout.active[0]),)
        return msgspec.structs.replace(seen, warnings=doubts if number else ())

    search, checks = check_roughly(bench, 0.3, throttle)
    assert checks <= 2 * MOST_TURNS
    assert search.best() is not None


def test_a_layout_that_breaks_as_it_is_checked_is_not_the_answer() -> None:
    """Memory that other processes hold by then is also missing in training.

    The next layout is chosen and checked.
    """
    search, broken = Search(PAIR.problem()), None
    while probes := search.ask():
        for probe in probes:
            if probe.stage == Stage.CHECK and broken is None:
                broken = probe.layout
                search.tell(OutOfMemory(probe, probe.layout.active[:1], "full", 1.0))
            else:
                search.tell(PAIR.measure([probe])[0])
    best = search.best()
    assert broken is not None
    assert best is not None
    assert best.layout != broken
    assert search._seen.timed_in(best.layout, Stage.CHECK)


def test_a_search_without_a_budget_never_says_that_its_budget_ended_it() -> None:
    """Steps vary so much that some speeds stay uncertain after eight turns."""
    fast, slow = (
        SimulatedDevice(
            name=name,
            memory_mib=10240,
            memory_base_mib=1000,
            memory_per_sample_mib=80,
            curve=((1, 600 * factor), (8, 1400 * factor), (64, 9000 * factor)),
            noise=0.9,
        )
        for name, factor in (("fast", 1.0), ("slow", 100.0))
    )
    machine, ask, ends = Machine((fast, slow)), search_trials.Ask(budget=None, most=64), set()
    for seed in (2, 3, 7):
        search = Search(search_trials.problem(machine, ask, seed))
        search_trials.finish(search, search_trials.StartingProber(machine, seed, ask))
        end = search.ended()
        assert end is not None
        assert "budget" not in end.words
        ends.add(end.stop)
    assert Stop.UNSTEADY in ends
