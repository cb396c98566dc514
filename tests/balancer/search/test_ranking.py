"""The ranking: what drifts cancels, ties are ties, the simplest of equals wins."""

from __future__ import annotations

import random

import pytest

from evener.balancer.search.layouts import Candidate, alone, evenly, packed
from evener.balancer.search.ranking import TIE, contenders, difference, ranked
from evener.balancer.types import Layout, Probe, Timed

SOLO = alone(2, 0, 100)
EVEN = evenly(2, (0, 1), 100)
assert EVEN is not None
PACK = packed(SOLO.layout, 2)


def timed(candidate: Candidate, rate: float, turn: int, spread: float = 0.002) -> Timed:
    """A turn at so many samples/s."""
    layout = candidate.layout
    step = layout.global_batch * layout.processes / rate
    unknown = (None, None)
    low, high = step * (1 - spread), step * (1 + spread)
    return Timed(Probe(layout, "race", 1.0, turn), step, low, high, 50, unknown, unknown, step, 1.0)


def turns(rates: dict[Candidate, list[float]]) -> dict[Layout, dict[int, Timed]]:
    """Each layout's turns from its samples/s."""
    return {one.layout: {turn: timed(one, rate, turn) for turn, rate in enumerate(own)} for one, own in rates.items()}


def test_a_drift_that_hits_all_alike_does_not_blur_the_difference() -> None:
    """A machine that slows by 30 % over three turns still tells 2 % from 0."""
    seen = turns({SOLO: [1000.0, 850.0, 700.0], EVEN: [980.5, 833.0, 686.0]})
    first, second = ranked((SOLO, EVEN), seen)
    assert first.candidate == SOLO
    assert second.against is not None
    assert second.against.value == pytest.approx(-0.02, abs=0.001)
    assert second.against.high < 0
    assert not second.tie


def test_what_can_not_be_told_apart_is_a_tie() -> None:
    seen = turns({SOLO: [1000.0, 940.0, 1030.0], EVEN: [990.0, 985.0, 960.0]})
    _, second = ranked((SOLO, EVEN), seen)
    assert second.tie


def test_of_two_that_nobody_could_tell_apart_the_simpler_wins() -> None:
    seen = turns({PACK: [1003.0] * 3, SOLO: [1000.0] * 3})
    first, second = ranked((PACK, SOLO), seen)
    assert (first.candidate, second.candidate) == (SOLO, PACK)
    assert second.tie


def test_a_clear_gain_wins_though_it_is_not_simple() -> None:
    seen = turns({PACK: [1030.0] * 3, SOLO: [1000.0] * 3})
    assert ranked((PACK, SOLO), seen)[0].candidate == PACK


def test_the_latency_is_that_of_one_step_the_throughput_that_of_all_trainings() -> None:
    (first,) = ranked((PACK,), turns({PACK: [1000.0]}))
    assert first.throughput.value == pytest.approx(1000.0)
    assert first.step.value == pytest.approx(0.2)


def test_the_hopeless_get_no_more_turns_and_the_close_do() -> None:
    seen = turns({SOLO: [1000.0], EVEN: [995.0], PACK: [600.0]})
    assert contenders((SOLO, EVEN, PACK), seen) == (SOLO, EVEN)


def test_a_settled_ranking_has_no_contenders() -> None:
    seen = turns({SOLO: [1000.0, 1001.0, 999.0], EVEN: [900.0, 901.0, 899.5]})
    assert contenders((SOLO, EVEN), seen) == ()


def test_one_turn_is_believed_less_than_three() -> None:
    one = difference({0: timed(EVEN, 990.0, 0)}, {0: timed(SOLO, 1000.0, 0)})
    assert one.low < 0 < one.high


def test_two_layouts_of_one_speed_tie_nearly_always() -> None:
    """With 1 % of noise a turn and three turns, equal layouts are told apart in at most 10 % of 200 races."""
    rng = random.Random(1)
    wrong = 0
    for _ in range(200):
        seen = turns({one: [1000.0 * rng.gauss(1, 0.01) for _ in range(3)] for one in (SOLO, EVEN)})
        wrong += not ranked((SOLO, EVEN), seen)[1].tie
    assert wrong <= 20
    assert TIE == 0.01
