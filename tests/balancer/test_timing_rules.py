"""The timing rules on scripted blocks: when they stop, what they report, and their doubts."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.probes.block_timing import (
    BLOCKS_PER_PROBE,
    ENOUGH_BLOCKS,
    FEWEST_BLOCKS,
    LONGEST_BLOCK_SECONDS,
    MOST_BLOCKS,
    SHORTEST_BLOCK_SECONDS,
    TIGHT,
    Block,
    BlockTimer,
    StepTiming,
    has_grown,
)
from evener.balancer.statistics import relative_half_width


def timed(
    seconds: float,
    step: Callable[[int], float],
    cpu: Callable[[int], float | None] = lambda _: None,
    *,
    whole: bool = False,
    steps_asked: int = 0,
) -> StepTiming:
    """Run the rules on a virtual clock. `step(i)` and `cpu(i)` are those of the i-th requested
    block.
    """
    timing, i = BlockTimer(seconds, whole, steps_asked), 0
    while steps := timing.next_steps():
        timing.add(Block(steps, steps * step(i), cpu(i), (0.5 * steps * step(i),)))
        i += 1
        assert i < 2000, "the rules must end"
    measured = timing.result()
    assert measured is not None
    return measured


def codes(measured: StepTiming) -> set[str]:
    """Return the names of the doubts."""
    return {doubt.code for doubt in measured.warnings}


@given(st.integers(2, 40), st.floats(0.05, 2.0))
def test_the_garbage_collector_counts_in_the_mean_and_is_no_noise(
    every: int, pause_steps: float
) -> None:
    """A pause comes with every nth step, and takes as long as a part of a step or several."""
    timer, done, step = BlockTimer(60.0), 0, 0.02
    pause_seconds = pause_steps * step
    while steps := timer.next_steps():
        pauses = (done + steps) // every - done // every
        done += steps
        timer.add(
            Block(
                steps,
                steps * step + pauses * pause_seconds,
                gc_seconds=pauses * pause_seconds,
                longest_gc_seconds=pause_seconds * bool(pauses),
            )
        )
    measured = timer.result()
    assert measured is not None
    if measured.step.value > step:  # at least one pause was timed
        assert measured.step.low <= step * (1 + pause_steps / every) <= measured.step.high
    assert not codes(measured) & {"drift", "throttled", "slow_start"}


def test_steady_steps_end_early_and_without_doubt() -> None:
    """A step that never varies is trusted after the fewest blocks that make an interval."""
    measured = timed(4.0, lambda _: 0.01)
    assert measured.step.value == measured.step.low == measured.step.high == 0.01
    assert measured.steps * 0.01 < 4.0
    assert not measured.warnings
    assert measured.own_seconds == (0.005,)


def test_slow_first_blocks_are_warm_up_and_not_counted() -> None:
    """What is slow only at first doesn't change the result."""
    measured = timed(4.0, lambda i: 1.0 if i < 2 else 0.01)
    assert measured.step.value == 0.01


def test_steps_that_keep_getting_faster_are_reported_as_a_slow_start() -> None:
    """A warm-up that never becomes steady ends at its limit, with a doubt."""
    assert "slow_start" in codes(timed(2.0, lambda i: 0.2 * 0.8**i))


def test_a_warm_up_takes_at_most_half_of_the_time() -> None:
    """Its windows never agree. The remaining time is measured."""
    timing, spent, i = BlockTimer(4.0, False, 0), 0.0, 0
    while (steps := timing.next_steps()) and timing.phase == "warming up":
        block = Block(steps, steps * (0.01 if i % 2 else 0.02), None, (None,))
        timing.add(block)
        spent, i = spent + block.wall_seconds, i + 1
    assert 2.0 <= spent < 2.6


def test_a_step_shorter_than_the_tick_of_the_clock_is_timed() -> None:
    """A block that took no time is followed by one with 16 times as many steps."""
    timing = BlockTimer(4.0)
    while steps := timing.next_steps():
        timing.add(Block(steps, steps * 1e-6 // 0.001 * 0.001))
    measured = timing.result()
    assert measured is not None
    assert measured.step.value == pytest.approx(1e-6, rel=0.01)


def test_noise_is_measured_until_the_interval_is_tight_or_the_time_spent() -> None:
    """With moderate noise, the interval reaches 1 %.

    With strong noise, the time ends the probe, with a doubt.
    """
    draw = random.Random(1)
    moderate = timed(60.0, lambda _: 0.01 * draw.gauss(1, 0.02))
    assert (moderate.step.high - moderate.step.low) / 2 / moderate.step.value <= TIGHT
    strong = timed(2.0, lambda _: 0.01 * max(0.1, draw.gauss(1, 0.4)))
    assert "noisy" in codes(strong)


@pytest.mark.parametrize(("noise", "hopeless"), [(0.06, True), (0.02, False)])
def test_noise_that_more_time_would_not_overcome_takes_half_of_it(
    noise: float, hopeless: bool
) -> None:
    """Blocks that vary by 6 % stay far from 1 % in 4 s; those that vary by 2 % come near it."""
    draw = random.Random(4)
    runs = [timed(4.0, lambda _: 0.01 * draw.gauss(1, noise)) for _ in range(20)]
    spent = [one.steps * one.step.value for one in runs if "noisy" in codes(one) or not hopeless]
    assert (1.9 < median(spent) < 2.6) == hopeless
    assert sum(one.step.value for one in runs) / len(runs) == pytest.approx(0.01, rel=0.02)


def test_drift_is_reported_with_its_sign() -> None:
    """Steps that become slower by 2 % with each block aren't noise."""
    draw = random.Random(2)
    measured = timed(2.0, lambda i: 0.05 * (1 + 0.02 * i) * draw.gauss(1, 0.004))
    (drift,) = [doubt.value for doubt in measured.warnings if doubt.code == "drift"]
    assert drift > 0.02


def test_a_clock_that_drops_midway_is_measured_again_and_still_reported() -> None:
    """Heat takes 20 % of the speed after a second.

    The result is that of the slow clock, and the doubt stays.
    """
    draw = random.Random(3)
    measured = timed(4.0, lambda i: 0.05 * (1.25 if i > 8 else 1.0) * draw.gauss(1, 0.02))
    assert {"drift", "throttled"} & codes(measured)
    assert abs(measured.step.value / 0.0625 - 1) < 0.03


def test_a_device_that_throttles_for_a_while_is_measured_again_and_still_reported() -> None:
    """It is throttled for a while only.

    The second round is at the full clock, and the doubt stays.
    """
    timing, count = BlockTimer(4.0), 0
    while steps := timing.next_steps():
        held = 2 < count < 12
        timing.add(Block(steps, steps * (0.08 if held else 0.05), slowed=0.4 if held else 0.0))
        count += 1
    measured = timing.result()
    assert measured is not None
    assert "throttled" in codes(measured)
    assert measured.step.value == 0.05


def test_disturbed_blocks_are_set_aside_and_measured_again() -> None:
    """Blocks in which others took the cores don't count while undisturbed ones are available."""
    measured = timed(
        4.0, lambda i: 0.02 if i % 3 == 0 else 0.01, lambda i: 0.5 if i % 3 == 0 else 1.0
    )
    assert measured.step.value == 0.01
    assert "disturbed" in codes(measured)


@pytest.mark.parametrize("often", [6, 2])
def test_blocks_that_take_new_memory_are_set_aside(often: int) -> None:
    """Every sixth or second block allocates new pages and takes longer.

    A training does that only in its first steps.
    """
    timing, i = BlockTimer(4.0), 0
    while steps := timing.next_steps():
        timing.add(Block(steps, steps * (0.01 if i % often else 0.017), grew=i % often == 0))
        i += 1
    measured = timing.result()
    assert measured is not None
    assert measured.step.value == 0.01
    assert not measured.warnings


def test_a_training_that_always_takes_new_memory_is_timed_all_the_same() -> None:
    """A leak is the training's own."""
    timing = BlockTimer(2.0)
    while steps := timing.next_steps():
        timing.add(Block(steps, steps * 0.01, grew=True))
    measured = timing.result()
    assert measured is not None
    assert measured.step.value == 0.01


@pytest.mark.parametrize(
    ("before", "after", "grown"),
    [
        ((100, 1000), (100, 1011), True),
        ((100, 1000), (101, 1010), False),
        ((100, 1000), (50, 500), False),
        ((None, 1000), (2000, 1000), False),
        ((1000,), (None,), False),
        ((), (1000, 1000), False),  # the first block
    ],
)
def test_memory_grows_by_more_than_one_percent_on_any_device(
    before: tuple[int | None, ...], after: tuple[int | None, ...], grown: bool
) -> None:
    """Unknown and falling memory don't count as growth."""
    assert has_grown(before, after) == grown


def test_all_blocks_disturbed_still_gives_a_figure_with_the_doubt() -> None:
    """On a machine that is never quiet, there is a result with a doubt."""
    measured = timed(2.0, lambda _: 0.01, lambda _: 0.7)
    assert measured.step.value == 0.01
    assert "disturbed" in codes(measured)


def test_rare_long_stalls_are_found_from_mean_and_median() -> None:
    """A quarter of the blocks take four times as long, so mean and median differ, and a block
    stands out.
    """
    measured = timed(2.0, lambda i: 0.04 if i % 4 == 3 else 0.01)
    assert {"throttled", "stalled"} <= codes(measured)


def doubts(steps: list[float], **changes: float) -> set[str]:
    """Return the doubts about blocks of one step each in a whole run.

    All blocks are equally throttled or capped.
    """
    timing = BlockTimer(2.0, steps=len(steps))
    for step in (1.0, 1.0, *steps):
        assert timing.next_steps() == 1
        timing.add(Block(1, step, **changes))  # type: ignore[arg-type]
    found = timing.result()
    assert found is not None
    assert found.steps == len(steps)
    return codes(found)


@pytest.mark.parametrize(
    ("steps", "changes", "expected"),
    [
        ([1.04, 0.96] * 8, {}, set()),  # ± 2.2 %
        ([1.07, 0.93] * 8, {}, {"noisy"}),  # ± 3.9 %
        ([0.985, 1.015] * 4 + [1.015, 1.045] * 4, {}, set()),  # 3 %, which is 3.7 standard errors
        (
            [0.987, 1.013] * 4 + [1.017, 1.043] * 4,
            {},
            {"drift"},
        ),  # 3 %, which is 4.3 standard errors
        ([1.0] * 8 + [1.015] * 8, {}, set()),
        ([1.0] * 8 + [1.025] * 8, {}, {"drift"}),
        ([1.0] * 3 + [1.1] * 3, {}, {"drift", "noisy"}),
        ([1.0] * 2 + [1.1] * 3, {}, {"noisy"}),  # too few for two halves
        ([1.0, 1.5], {}, {"too_short", "noisy"}),  # two blocks
        ([1.0] * 9 + [2.5], {}, {"noisy", "throttled"}),
        ([1.0] * 39 + [3.1], {}, {"noisy", "throttled", "stalled"}),
        ([1.0] * 19 + [1.9], {}, {"noisy"}),  # mean and median are 4.5 % apart
        ([1.0] * 8, {"slowed": 0.04, "capped": 0.19}, set()),
        ([1.0] * 8, {"slowed": 0.06, "capped": 0.21}, {"throttled", "capped"}),
    ],
)
def test_a_doubt_begins_where_it_matters(
    steps: list[float], changes: dict[str, float], expected: set[str]
) -> None:
    """It doesn't begin at the noise of any measurement, nor only when it is obvious."""
    assert doubts(steps, **changes) == expected


def test_a_doubt_says_by_how_much() -> None:
    """Values are relative to the step, whatever its length."""
    timing = BlockTimer(40.0, steps=40)
    for step in (20.0, 20.0, *[20.0] * 39, 80.0):
        assert timing.next_steps() == 1
        timing.add(Block(1, step, slowed=0.3, slowest=1, capped=0.5))
    found = timing.result()
    assert found is not None
    said = {doubt.code: doubt for doubt in found.warnings}
    assert said["stalled"].value == pytest.approx(4.0)
    assert (said["throttled"].value, said["throttled"].device) == (pytest.approx(0.3), 1)
    assert (said["capped"].value, said["capped"].device) == (pytest.approx(0.5), -1)


def test_a_step_longer_than_all_of_the_time_is_the_figure() -> None:
    """The probe ends there with a rough result. Steps of half the time are timed three times."""
    glance = timed(1.0, lambda _: 5.0)
    assert glance.steps == 1
    assert any(warning.code == "too_short" for warning in glance.warnings)
    assert 0.1 < relative_half_width(glance.step) < 0.15
    assert timed(1.0, lambda _: 0.5).steps == FEWEST_BLOCKS


def test_a_long_first_block_of_many_steps_is_warm_up() -> None:
    """A pack has such blocks, as its trainings run for a fixed time.

    Steps while some trainings still warmed up don't count.
    """
    timer = BlockTimer(2.0)
    assert timer.next_steps()
    timer.add(Block(40, 2.4))  # 60 ms per step, later 10
    while steps := timer.next_steps():
        timer.add(Block(steps, steps * 0.01))
    timing = timer.result()
    assert timing is not None
    assert timing.step.value == pytest.approx(0.01)
    assert "too_short" not in codes(timing)


def test_nothing_timed_is_nothing_known() -> None:
    """Stopping in the warm-up gives no result."""
    timing = BlockTimer(1.0)
    timing.add(Block(1, 0.5))
    assert timing.result() is None
    assert timing.interval() is None
    assert timing.phase == "warming up"


@settings(max_examples=30, deadline=None)
@given(
    step=st.floats(1e-5, 3.0),
    noise=st.floats(0.0, 0.5),
    seconds=st.floats(0.01, 20.0),
    seed=st.integers(0, 1000),
)
def test_whatever_the_steps_the_rules_end_in_bounded_time(
    step: float, noise: float, seconds: float, seed: int
) -> None:
    """A probe takes at most its time and one block more, or the fewest blocks.

    A lucky window may make these 16 times too long.
    """
    draw = random.Random(seed)
    measured = timed(seconds, lambda _: step * max(0.05, draw.gauss(1, noise)))
    spent = measured.steps * measured.step.value
    block = min(max(seconds / BLOCKS_PER_PROBE, SHORTEST_BLOCK_SECONDS), LONGEST_BLOCK_SECONDS)
    assert spent <= max(seconds, 0.1) * 1.75 + (ENOUGH_BLOCKS + 1) * 16 * max(step, block)
    assert measured.step.low <= measured.step.value <= measured.step.high


def whole_run(
    timing: BlockTimer, step: Callable[[], float], cpu: Callable[[], float | None]
) -> list[Block]:
    """Return the blocks that a whole run counted: those requested once it measures."""
    counted: list[Block] = []
    while steps := timing.next_steps():
        block = Block(steps, steps * step(), cpu(), slowed=0.3)
        if timing.phase == "measuring":
            counted.append(block)
        timing.add(block)
        assert len(counted) < 5000, "the rules must end"
    return counted


STEPS = st.floats(1e-4, 3.0)
NOISE = st.sampled_from([0.0, 0.001, 0.05, 0.5, 2.0])
CPU_SHARES = st.lists(st.sampled_from([None, 0.5, 1.0]), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(
    step=STEPS,
    noise=NOISE,
    shares=CPU_SHARES,
    seconds=st.floats(0.02, 300.0),
    seed=st.integers(0, 1000),
)
def test_a_whole_run_never_ends_before_its_time(
    step: float, noise: float, shares: list[float | None], seconds: float, seed: int
) -> None:
    """However precise, imprecise, throttled or disturbed it is, all its seconds are timed.

    Each step counts, and the run ends.
    """
    draw = random.Random(seed)
    timing = BlockTimer(seconds, whole=True)
    counted = whole_run(
        timing, lambda: step * max(0.05, draw.gauss(1, noise)), lambda: draw.choice(shares)
    )
    assert sum(block.wall_seconds for block in counted) >= seconds
    assert (
        sum(block.wall_seconds for block in counted[:-1]) < seconds or len(counted) == FEWEST_BLOCKS
    )
    measured = timing.result()
    assert measured is not None
    assert measured.steps == sum(block.steps for block in counted)


@settings(max_examples=30, deadline=None)
@given(
    step=STEPS,
    noise=NOISE,
    shares=CPU_SHARES,
    asked=st.integers(1, 20_000),
    seed=st.integers(0, 1000),
)
def test_a_run_of_steps_never_ends_before_them_and_adds_none(
    step: float, noise: float, shares: list[float | None], asked: int, seed: int
) -> None:
    """Exactly the requested steps are timed, whatever the noise, and more only if three blocks need
    them.
    """
    draw = random.Random(seed)
    timing = BlockTimer(10.0, steps=asked)
    counted = whole_run(
        timing, lambda: step * max(0.05, draw.gauss(1, noise)), lambda: draw.choice(shares)
    )
    assert sum(block.steps for block in counted) == max(asked, FEWEST_BLOCKS)
    measured = timing.result()
    assert measured is not None
    assert measured.steps == max(asked, FEWEST_BLOCKS)


def test_a_whole_run_that_drifts_is_not_restarted_and_the_drift_is_reported() -> None:
    """The clock drops midway. Both halves count, because that time was requested."""
    draw = random.Random(3)
    measured = timed(
        4.0, lambda i: 0.05 * (1.25 if i > 8 else 1.0) * draw.gauss(1, 0.02), whole=True
    )
    assert "drift" in codes(measured)
    assert 0.052 < measured.step.value < 0.0615
    assert measured.steps * measured.step.value >= 4.0


def test_no_number_of_blocks_ends_a_whole_run_and_none_takes_long_for_what_was_done() -> None:
    """A day's run has a few thousand blocks. Each is a small part of the time before it."""
    timing = BlockTimer(86_400.0, whole=True)
    counted = whole_run(timing, lambda: 0.01, lambda: None)
    assert MOST_BLOCKS < len(counted) < 10 * MOST_BLOCKS
    done = 0.0
    for block in counted:
        assert block.wall_seconds <= max(0.6, done / 100)
        done += block.wall_seconds
    assert done >= 86_400


def test_disturbed_blocks_of_a_whole_run_count_as_steps_but_not_in_the_figure() -> None:
    """Disturbed steps ran all the same."""
    share = {0: 0.5}
    measured = timed(
        4.0,
        lambda i: 0.02 if i % 3 == 0 else 0.01,
        lambda i: share.get(i % 3, 1.0),
        whole=True,
        steps_asked=500,
    )
    assert measured.steps == 500
    assert measured.step.value == 0.01
