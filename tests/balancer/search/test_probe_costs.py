"""The cost of probes, how long they may measure, and which part of a budget each stage
may spend.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evener.balancer.families import Placement
from evener.balancer.search.budget import BASE_SECONDS, Budget
from evener.balancer.search.layouts import BALANCE, LayoutOptions
from evener.balancer.search.observations import Observations
from evener.balancer.types import Layout, Probe, Problem, Stage, Timed, solo

SPLIT = Layout("split", (60, 40))
ALL = LayoutOptions(placements=(Placement("towers"), Placement("alternate")), knobs=("xla",))


def timed(
    layout: Layout, stage: Stage = Stage.SOLO, step: float = 0.1, turn: int = 0, **changes: Any
) -> Timed:
    """Return ten steps in 2 s, of which one isn't timed."""
    nothing = (None,) * len(layout.shares)
    seen = Timed(
        Probe(layout, stage, 1.0, turn),
        step,
        step,
        step,
        10,
        nothing,
        nothing,
        step,
        10 * step + 1.0,
    )
    return msgspec.structs.replace(seen, **changes)


def budget(
    *seen: Timed,
    seconds: float | None = 100.0,
    options: LayoutOptions = BALANCE,
    devices: int = 2,
    **others: Any,
) -> Budget:
    """Return a budget of which these probes were spent."""
    problem = Problem(devices, (None,) * devices, budget_seconds=seconds)
    found = Observations(problem)
    for one in seen:
        found.add(one)
    return Budget(problem, options, found, **others)


# ---------------------------------------------------------------------- how long a probe measures


@pytest.mark.parametrize(
    ("stage", "step", "seconds"),
    [
        *((stage, 0.01, seconds) for stage, seconds in BASE_SECONDS.items()),
        ("solo", 1.0, 12.0),
        ("solo", 30.0, 60.0),
    ],
)
def test_without_a_budget_a_probe_lasts_for_its_stage_or_for_twelve_steps(
    stage: Stage, step: float, seconds: float
) -> None:
    assert budget(seconds=None).probe_seconds(SPLIT, stage, 3, step) == seconds


def test_a_budget_is_shared_out_over_the_probes_of_a_stage() -> None:
    """Later turns may use 95 of 100 s.

    2 s are spent, and a split's children start in 1.5 times 1 s.
    """
    found = budget(timed(solo(2, 0, 8), elapsed_seconds=2.0, start_seconds=1.0))
    left = 100 - 2 - 1.5
    assert found.probe_seconds(SPLIT, Stage.RACE, 40, 0.01) == pytest.approx(
        left / 40 - found.time.overhead_seconds, abs=0.001
    )
    assert found.probe_seconds(SPLIT, Stage.RACE, 2, 0.01) == BASE_SECONDS[Stage.RACE]
    assert found.probe_seconds(SPLIT, Stage.RACE, 40, 0.01, reserved=20) == pytest.approx(
        (left - 20) / 40 - found.time.overhead_seconds, abs=0.001
    )
    assert found.probe_seconds(SPLIT, Stage.RACE, 0, 1.0) == 12.0
    assert found.probe_seconds(SPLIT, Stage.RACE, 10_000, 0.01) == 0.2


def test_a_probe_of_exploration_has_a_tenth_of_what_is_left() -> None:
    found = budget(timed(solo(2, 0, 8), step=4.0, elapsed_seconds=41.0))
    assert found.probe_seconds(solo(2, 0, 512), Stage.SOLO, 1, 0.4) == pytest.approx(
        (95 - 41) / 10 - 1
    )
    assert found.probe_seconds(solo(2, 0, 512), Stage.SOLO, 1, 0.4, reserved=6.0) == pytest.approx(
        (95 - 47) / 10 - 1
    )


@pytest.mark.parametrize("step", [1.0, 2.0, 12.0])
def test_a_probe_is_of_a_lone_step_where_six_would_take_more_than_a_tenth(step: float) -> None:
    """The timer stops after a step that takes longer than the whole probe should."""
    found = budget(
        timed(solo(2, 0, 8), step=4.0, first_step_seconds=4.5, elapsed_seconds=41.0),
    )
    for stage in (Stage.SOLO, Stage.REST, Stage.SPLIT):
        assert found.probe_seconds(solo(2, 0, 512), stage, 1, step) < step
    assert found.least_seconds(solo(2, 0, 512), step) == pytest.approx(2 * step + 0.5)
    assert found.probe_seconds(solo(2, 0, 512), Stage.CHECK, 1, step) >= 2 * step


def test_a_lone_step_needs_slow_steps_and_a_budget() -> None:
    """Short steps say too little. If the first step tunes kernels, lone steps save nothing."""
    spent = timed(solo(2, 0, 8), elapsed_seconds=93.0)
    assert budget(spent).probe_seconds(SPLIT, Stage.SPLIT, 1, 0.3) >= 2 * 0.3
    assert budget(seconds=None).probe_seconds(SPLIT, Stage.SPLIT, 1, 12.0) >= 2 * 12.0
    tuned = timed(solo(2, 0, 64), step=0.5, turn=1, first_step_seconds=20.0, elapsed_seconds=50.0)
    first = timed(solo(2, 0, 8), step=0.05, first_step_seconds=2.0)
    assert budget(first, tuned).probe_seconds(SPLIT, Stage.SPLIT, 1, 2.0) >= 2 * 2.0


def test_exploring_with_lone_steps_leaves_no_more_than_the_time_for_what_comes_after_it() -> None:
    found = budget(timed(solo(2, 0, 8), elapsed_seconds=45.0))
    assert found.has_time(30, reserved=20, step_seconds=10.0)
    assert not found.has_time(30, reserved=20.1, step_seconds=10.0)


def test_a_round_takes_a_part_of_what_is_left_and_leaves_the_time_of_the_first_split() -> None:
    found = budget(timed(solo(2, 0, 8), elapsed_seconds=45.0))
    assert found.has_time(0.4 * 50)
    assert not found.has_time(0.4 * 50 + 0.1)
    assert found.has_time(0.2 * 50, reserved=1)
    assert not found.has_time(0.2 * 50 + 0.1, reserved=1)
    assert found.has_time(10, reserved=40)
    assert not found.has_time(10, reserved=40.1)


@pytest.mark.parametrize(
    ("stage", "turn", "end"),
    [("solo", 0, 95), ("split", 0, 95), ("race", 0, 100), ("race", 1, 95), ("pack", 0, 65)],
)
def test_a_stage_ends_at_its_part_of_the_budget(stage: Stage, turn: int, end: float) -> None:
    """The shortest probe, of 0.2 s, has to end by then."""
    for spent, fits in ((end - 0.25, True), (end - 0.15, False)):
        found = budget(timed(solo(2, 0, 8), step=spent / 10, elapsed_seconds=spent))
        assert found.affords(SPLIT, stage, 0.01, turn) == fits
        assert not found.affords(SPLIT, stage, 0.01, turn, reserved=0.2)
    assert budget(seconds=None).affords(SPLIT, stage, 0.01, turn)


def test_when_the_race_is_over_exploration_may_have_the_rest() -> None:
    for spent, fits in ((70.0, True), (94.9, False)):
        seen = timed(solo(2, 0, 8), step=spent / 10, elapsed_seconds=spent)
        assert not budget(seen, options=ALL).affords(solo(2, 0, 64), Stage.SOLO, 0.01)
        assert (
            budget(seen, options=ALL, race_is_over=True).affords(solo(2, 0, 64), Stage.SOLO, 0.01)
            == fits
        )


# ---------------------------------------------------------------------- what a probe costs


def test_children_that_stand_start_in_no_time() -> None:
    """New children take as long as the slowest start of a device alone, for each kind of layout.

    Packs take that time for each training.
    """
    found = budget(timed(solo(2, 0, 8), start_seconds=4.0), timed(solo(2, 1, 8), start_seconds=3.0))
    assert found.starts.seconds(solo(2, 0, 64)) == 0.0
    assert found.starts.seconds(SPLIT) == pytest.approx(1.5 * 4)
    assert found.starts.seconds(Layout("place", (1, 1), placement="towers")) == pytest.approx(4.0)
    assert found.starts.seconds(Layout("pack", (8, 0), 3)) == pytest.approx(0.8 * 4 * 3)
    assert budget().starts.seconds(SPLIT) == 0.0
    spared = budget(timed(solo(2, 0, 8), start_seconds=16.0, import_seconds=12.0))
    assert spared.starts.seconds(SPLIT) == pytest.approx(1.5 * 4), "imports come once"


def test_packs_start_in_proportion_or_sooner_where_a_second_size_did() -> None:
    """Two trainings start in 6 s, four in 8 s, so each further one takes one second, not three."""
    two, four = (
        timed(Layout("pack", (8, 0), size), Stage.PACK, start_seconds=seconds)
        for size, seconds in ((2, 6.0), (4, 8.0))
    )
    six = Layout("pack", (8, 0), 6)
    assert budget(two).starts.seconds(six) == pytest.approx(18.0)
    assert budget(two, four).starts.seconds(six) == pytest.approx(10.0)


def test_children_that_make_way_again_and_again_pay_their_least_start_each_time() -> None:
    first, second = (
        timed(SPLIT, Stage.SPLIT, start_seconds=6.0),
        timed(SPLIT, Stage.RACE, turn=1, start_seconds=5.0),
    )
    assert budget(first).starts.seconds(SPLIT) == 0.0
    assert budget(first, second).starts.seconds(SPLIT) == 5.0


def test_the_shortest_probe_has_five_steps_and_its_warm_up() -> None:
    """A layout that ran takes its own extra time again, another layout the median."""
    found = budget(
        timed(solo(2, 0, 8)),
        timed(solo(2, 1, 8), elapsed_seconds=4.0),
        timed(solo(2, 0, 64), turn=1, elapsed_seconds=7.0),
    )
    assert found.time.overhead_seconds == pytest.approx(3.0)  # 1, 3 and 6 s
    assert found.least_seconds(solo(2, 0, 8), 0.01) == pytest.approx(1.0 + 0.2)
    assert found.least_seconds(solo(2, 0, 8), 1.0) == pytest.approx(1.0 + 5.0)
    assert found.least_seconds(solo(2, 1, 64), 0.01) == pytest.approx(3.0 + 0.2)
    assert budget().time.overhead_seconds == 0.0


def test_steps_that_try_kernels_out_are_counted_by_how_they_grow() -> None:
    """A first step of 0.3 s at 10 ms, and of 11.2 s at 110 ms, is 109 / 0.1 - 1 steps more.

    There are none if sizes hardly differ.
    """
    quick = timed(solo(2, 0, 8), step=0.01, first_step_seconds=0.3)
    slow = timed(solo(2, 0, 64), step=0.11, turn=1, first_step_seconds=11.2)
    found = budget(quick, slow, seconds=None)
    assert found.time.tuning_steps == pytest.approx(108.0)
    assert found.time.longest_step() == pytest.approx(60 / 113)
    near = timed(solo(2, 0, 64), step=0.0119, turn=1, first_step_seconds=11.2)
    assert budget(quick, near).time.tuning_steps == 0.0
    sooner = timed(solo(2, 0, 64), step=0.11, turn=1, first_step_seconds=0.1)
    assert budget(quick, sooner).time.tuning_steps == 0.0


def test_a_layout_that_never_ran_steps_as_its_devices_alone_promise() -> None:
    """A split is as slow as its slowest device, a pack as fast as the fastest. Two slow steps."""
    found = budget(timed(solo(2, 0, 10)), timed(solo(2, 1, 5)), timed(solo(2, 0, 1), turn=1))
    assert found.least_seconds(Layout("split", (300, 300))) == pytest.approx(2 * 600 / 150)
    assert found.least_seconds(Layout("pack", (100, 0), 4)) == pytest.approx(2 * 400 / 100)


# ---------------------------------------------------------------------- turns and longer budgets


def test_turns_left_are_those_that_the_rest_of_the_budget_pays() -> None:
    """Of 95 % of the budget, each turn takes at least a usual probe for every layout."""
    found = budget(timed(solo(2, 0, 10), elapsed_seconds=15.0))
    assert found.turns_left([SPLIT, Layout("split", (50, 50))]) == pytest.approx(80 / (2 * 19))
    quick = budget(timed(solo(2, 0, 1000), elapsed_seconds=15.0, steps=150))
    assert quick.turns_left([solo(2, 1, 8)]) == pytest.approx(80 / BASE_SECONDS[Stage.RACE])
    assert found.turns_left([]) == 0.0
    assert budget(timed(solo(2, 0, 10), elapsed_seconds=99.0)).turns_left([SPLIT]) == 0.0
    assert budget(seconds=None).turns_left([SPLIT]) == float("inf")


def test_a_budget_that_grows_packs_counts_the_first_turns_alone() -> None:
    found = budget(
        timed(solo(2, 0, 10), elapsed_seconds=10.0), timed(SPLIT, Stage.RACE, elapsed_seconds=5.0),
        timed(SPLIT, Stage.RACE, turn=1, elapsed_seconds=50.0),
    )  # fmt: skip
    assert found.budget_with_larger_packs(11.0) == pytest.approx((10 + 5 + 11) / 0.65)


# ---------------------------------------------------------------------- exploration's part


def test_a_plan_may_explore_with_all_of_its_budget_and_a_comparison_with_a_part() -> None:
    """Packs and placements follow exploration, and their children have to start."""
    assert budget().time.explore_seconds == 95
    for options in (ALL, LayoutOptions(("solo", "pack"))):
        assert budget(options=options).time.explore_seconds == pytest.approx(40)


def test_the_longest_step_is_a_part_of_what_exploration_has_left() -> None:
    """It is 40 % for a probe of two steps, alone or in a split, and at most a fifth of a minute."""
    assert budget(seconds=50.0).time.longest_step() == pytest.approx(0.4 * 0.95 * 50 / 2)
    assert budget(seconds=1000.0).time.longest_step() == pytest.approx(60 / 5)
    spent = timed(solo(2, 0, 8), elapsed_seconds=31.0)
    split = timed(SPLIT, Stage.SPLIT, elapsed_seconds=20.0)
    found = budget(spent, split)
    assert found.time.longest_step() == pytest.approx(
        max(0.2, 0.4 * (95 - 51) - found.time.overhead_seconds) / 2
    )
    assert budget(seconds=None).time.longest_step() == pytest.approx(60 / 5)
    assert budget(timed(solo(2, 0, 8), elapsed_seconds=99.9)).time.longest_step() == pytest.approx(
        0.2 / 2
    )
