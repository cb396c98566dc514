"""The ranking: drift cancels, ties are ties, the simplest of equals wins, and turns go where they
matter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from statistics import harmonic_mean
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.families import find_family, pack_on, split_evenly
from evener.balancer.search.layouts import TIE, Candidate
from evener.balancer.search.model.evidence import relative_error
from evener.balancer.search.ranking import (
    PROBE_DRIFT,
    Difference,
    RankedLayout,
    compare_turns,
    rank,
    throughput,
    undecided,
)
from evener.balancer.types import Layout, Probe, Problem, Stage, Timed, solo

SOLO = Candidate(find_family("solo"), solo(2, 0, 100))
EVEN = Candidate(find_family("even"), cast(Layout, split_evenly(2, (0, 1), 100)))
PACK = Candidate(find_family("pack"), pack_on(SOLO.layout, 2))
FIXED = Problem(2, (None, None), global_batch=100)
FREE = Problem(2, (None, None), tolerance=0.02)


def timed(candidate: Candidate, rate: float, turn: int, spread: float = 0.002) -> Timed:
    """Return a turn at this rate in samples/s, with the relative error `spread`."""
    layout = candidate.layout
    step = layout.global_batch * layout.processes / rate
    unknown = (None, None)
    low, high = step * (1 - spread), step * (1 + spread)
    return Timed(
        Probe(layout, Stage.RACE, 1.0, turn), step, low, high, 50, unknown, unknown, step, 1.0
    )


def turns(
    rates: Mapping[Candidate, list[float]], spread: float = 0.002
) -> dict[Layout, dict[int, Timed]]:
    """Return each layout's turns from its samples/s."""
    return {
        one.layout: {turn: timed(one, rate, turn, spread) for turn, rate in enumerate(own)}
        for one, own in rates.items()
    }


def ranked(
    rates: Mapping[Candidate, list[float]], problem: Problem = FIXED
) -> tuple[RankedLayout, ...]:
    """Return the ranking of layouts with these samples/s."""
    return rank(tuple(rates), turns(rates), problem)


def wanted(
    rates: Mapping[Candidate, list[float]], left: float = 9, most: int = 8
) -> tuple[list[Candidate], bool]:
    """Return which layouts deserve another turn without a tolerance, and whether a tie was given
    up.
    """
    return undecided(tuple(rates), turns(rates), left, most)


def test_a_drift_that_hits_all_alike_does_not_blur_the_difference() -> None:
    """A machine that slows down by 30 % over three turns still distinguishes 2 % from 0."""
    first, second = ranked({SOLO: [1000.0, 850.0, 700.0], EVEN: [980.5, 833.0, 686.0]})
    assert first.candidate == SOLO
    assert second.against is not None
    assert second.against.value == pytest.approx(-0.02, abs=0.001)
    assert second.against.high < 0
    assert not second.tie


def test_turns_that_only_one_took_are_left_out_of_the_difference() -> None:
    """The other's third turn was measured when the machine was half as fast."""
    one, other = turns({SOLO: [1000.0, 1000.0, 500.0], EVEN: [900.0, 900.0]}).values()
    assert compare_turns(other, one).value == pytest.approx(-0.1)
    assert compare_turns(other, one).turns == 2


def test_layouts_without_a_turn_in_common_are_compared_by_all_they_have() -> None:
    """They have one difference, whose error includes both."""
    one = {0: timed(SOLO, 1000.0, 0), 2: timed(SOLO, 1000.0, 2)}
    found = compare_turns({1: timed(EVEN, 900.0, 1)}, one)
    assert found.value == pytest.approx(-0.1)
    assert found.turns == 1


def test_layouts_that_can_not_be_distinguished_are_a_tie() -> None:
    _, second = ranked({SOLO: [1000.0, 940.0, 1030.0], EVEN: [990.0, 985.0, 960.0]})
    assert second.tie
    assert not second.unclear


def test_figures_that_do_not_overlap_are_no_tie_however_rough_they_are() -> None:
    """The error of the difference exceeds the difference, but one is six times the other."""
    rough = turns({SOLO: [23305.0], EVEN: [3542.0]}, spread=0.6)
    _, second = rank((SOLO, EVEN), rough, FIXED)
    assert second.against is not None
    assert second.against.high > 0
    assert not second.tie


def test_a_tie_that_may_be_a_large_difference_is_called_unclear() -> None:
    first, second = ranked({SOLO: [1000.0, 700.0, 1100.0], EVEN: [800.0, 850.0, 700.0]})
    assert second.tie
    assert second.unclear
    assert not first.unclear


def test_of_two_indistinguishable_layouts_the_simpler_wins() -> None:
    first, second = ranked({PACK: [1003.0] * 3, SOLO: [1000.0] * 3})
    assert (first.candidate, second.candidate) == (SOLO, PACK)
    assert second.tie


def test_of_equally_simple_layouts_the_faster_wins() -> None:
    other = Candidate(find_family("solo"), solo(2, 1, 100))
    assert ranked({SOLO: [1000.0] * 3, other: [1003.0] * 3})[0].candidate == other


def test_a_clear_gain_wins_though_it_is_not_simple() -> None:
    assert ranked({PACK: [1030.0] * 3, SOLO: [1000.0] * 3})[0].candidate == PACK


def test_of_a_free_batch_the_smallest_within_the_tolerance_wins() -> None:
    """Of two with the same batch, the faster wins. The ranking behind the winner is by
    throughput.
    """
    large, small, smaller = (
        Candidate(find_family("solo"), solo(2, 0, batch)) for batch in (400, 200, 150)
    )
    twin = Candidate(find_family("solo"), solo(2, 1, 200))
    rates = {large: [1000.0] * 3, small: [985.0] * 3, twin: [990.0] * 3, smaller: [950.0] * 3}
    assert [one.candidate for one in ranked(rates, FREE)] == [twin, large, small, smaller]
    assert ranked(rates, Problem(2, (None, None), tolerance=0.0))[0].candidate == large


def test_a_batch_beyond_the_tolerance_by_what_a_measurement_tells_is_not_taken() -> None:
    """2.4 % slower in eight turns that agree is more than 2 %; in one turn it is unknown."""
    large, small = (Candidate(find_family("solo"), solo(2, 0, batch)) for batch in (400, 200))
    assert ranked({large: [1000.0] * 8, small: [976.2] * 8}, FREE)[0].candidate == large
    assert ranked({large: [1000.0], small: [976.2]}, FREE)[0].candidate == small
    assert ranked({large: [1000.0], small: [974.0]}, FREE)[0].candidate == large


def test_the_deviation_of_a_turn_is_drawn_to_what_drift_is_assumed() -> None:
    """The assumption counts like four turns, in addition to the turns' own uncertainty."""
    one, other = turns({SOLO: [1000.0, 1030.0, 1000.0], EVEN: [1000.0] * 3}).values()
    found = compare_turns(one, other)
    own = 2 * relative_error(one[0]) ** 2
    spread = 0.03**2 / 3
    assert found.value == pytest.approx(0.01)
    assert found.deviation == pytest.approx(
        math.sqrt((4 * (own + PROBE_DRIFT**2) + 2 * spread) / 6)
    )
    half = 2.4469 * found.deviation / math.sqrt(3)
    assert found.interval().high == pytest.approx(0.01 + half)
    assert found.interval().low == pytest.approx(0.01 - half)


def test_a_pack_is_beaten_by_a_clear_gain_only_whatever_its_batch() -> None:
    """Its batch is that of one of its trainings, so the tolerance for smaller batches doesn't
    apply.
    """
    small = Candidate(find_family("solo"), solo(2, 0, 10))
    assert ranked({PACK: [1000.0] * 3, small: [985.0] * 3}, FREE)[0].candidate == PACK


def test_the_latency_is_that_of_one_step_the_throughput_that_of_all_trainings() -> None:
    (first,) = ranked({PACK: [1000.0]})
    assert first.throughput.value == pytest.approx(1000.0)
    assert first.step.value == pytest.approx(0.2)
    assert first.step.low < first.step.value < first.step.high
    assert first.against is None


def test_what_did_not_run_has_no_place() -> None:
    assert rank((SOLO, PACK), turns({SOLO: [1000.0]}), FIXED)[0].candidate == SOLO
    assert rank((PACK,), {}, FIXED) == ()


def test_the_hopeless_get_no_more_turns_and_the_close_do() -> None:
    assert wanted({SOLO: [1000.0], EVEN: [999.0], PACK: [600.0]}) == ([SOLO, EVEN], False)


def test_a_decided_ranking_has_no_more_turns() -> None:
    assert wanted({SOLO: [1000.0, 1001.0, 999.0], EVEN: [900.0, 901.0, 899.5]}) == ([], False)
    assert wanted({SOLO: [1000.0]}) == ([], False)


@pytest.mark.parametrize(("left", "most"), [(0.5, 8), (9, 1)])
def test_a_difference_that_no_turn_can_decide_is_a_tie_and_gets_none(
    left: float, most: int
) -> None:
    """Neither the budget nor the number of turns allows another one."""
    assert wanted({SOLO: [1000.0], EVEN: [999.0]}, left, most) == ([], True)


def test_a_noisy_difference_that_few_turns_would_not_decide_is_given_up() -> None:
    """A turn has 10 % of noise.

    With two more turns, the expected gain still matters; with 60 it doesn't.
    """
    rates = {SOLO: [1000.0] * 3, EVEN: [880.0, 1100.0, 975.0]}
    assert wanted(rates, 2) == ([], True)
    assert wanted(rates, 60, 100) == ([SOLO, EVEN], False)


def test_one_turn_is_believed_less_than_three() -> None:
    one = compare_turns({0: timed(EVEN, 990.0, 0)}, {0: timed(SOLO, 1000.0, 0)}).interval()
    assert one.low < 0 < one.high


@pytest.mark.parametrize(
    ("noise", "count", "most"), [(0.005, 3, 0.05), (0.01, 3, 0.2), (0.01, 8, 0.05)]
)
def test_two_layouts_of_one_speed_tie_nearly_always(noise: float, count: int, most: float) -> None:
    """They tie in 95 % of races with the assumed drift, and after eight turns with twice that
    drift.
    """
    rng = random.Random(1)
    wrong = 0
    for _ in range(400):
        rates = {one: [1000.0 * rng.gauss(1, noise) for _ in range(count)] for one in (SOLO, EVEN)}
        wrong += not ranked(rates)[1].tie
    assert wrong <= 400 * most


def test_a_negligible_difference_is_a_tie_however_certain() -> None:
    assert ranked({SOLO: [1000.0] * 8, EVEN: [1000 * (1 - 0.9 * TIE)] * 8})[1].tie
    assert not ranked({SOLO: [1000.0] * 8, EVEN: [1000 * (1 - 1.1 * TIE)] * 8})[1].tie


@given(st.floats(-0.2, 0.2), st.floats(1e-4, 0.1), st.integers(1, 8))
def test_the_gain_to_expect_is_that_of_a_normal_difference(
    value: float, deviation: float, count: int
) -> None:
    """E[max(0, d)] is computed by the trapezoidal rule.

    More turns never promise more, and the value itself is the minimum.
    """
    found = Difference(value, deviation, count)
    error = deviation / math.sqrt(count)
    steps = [value + error * (n / 100 - 8) for n in range(1601)]
    density = [
        math.exp(-(((x - value) / error) ** 2) / 2) / error / math.sqrt(2 * math.pi) for x in steps
    ]
    direct = math.fsum(max(0.0, x) * d for x, d in zip(steps, density, strict=True)) * error / 100
    assert found.expected_gain() == pytest.approx(direct, abs=1e-4 * error + 1e-12)
    assert max(0.0, value) <= found.expected_gain(3) + 1e-12
    assert found.expected_gain(3) <= found.expected_gain() + 1e-12


def test_turns_that_agree_sharpen_a_figure_and_turns_that_differ_widen_it() -> None:
    """Turns that differ by more than their intervals don't average to false certainty."""
    agree = throughput(turns({SOLO: [1000.0] * 4}, 0.02)[SOLO.layout])
    assert agree.value == pytest.approx(1000.0)
    assert 10 < agree.high - agree.low < 20  # of 40 for one turn; that they agree counts too
    apart = throughput(turns({SOLO: [900.0, 1100.0]})[SOLO.layout])
    assert apart.value == pytest.approx(harmonic_mean([900.0, 1100.0]))
    assert apart.low < 900
    assert apart.high > 1100


def test_a_single_turn_has_its_own_interval() -> None:
    figure = throughput(turns({SOLO: [1000.0]}, 0.01)[SOLO.layout])
    assert (figure.low, figure.high) == (
        pytest.approx(990, rel=1e-3),
        pytest.approx(1010, rel=1e-3),
    )


def test_two_turns_a_little_apart_are_known_to_little_more_than_that() -> None:
    """Two turns differ by 2 %, one of them without noise.

    The interval includes both and isn't absurdly wide.
    """
    own = {0: timed(SOLO, 1000.0, 0, 0.0), 1: timed(SOLO, 1020.0, 1, 0.001)}
    figure = throughput(own)
    assert figure.low <= 1000.0
    assert figure.high >= 1020.0
    assert figure.high - figure.low <= 100
