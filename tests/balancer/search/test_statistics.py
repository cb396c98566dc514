"""Intervals hold what they promise."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from evener.balancer.search import statistics as stats
from evener.balancer.types import Interval


def test_student_meets_the_normal_and_the_table() -> None:
    """Quantiles fall with the degrees of freedom and end at the normal one."""
    values = [stats.student(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(12.706, abs=1e-3)
    assert stats.student(60) == pytest.approx(2.0003, abs=2e-3)
    assert stats.student(10**6) == pytest.approx(stats.NORMAL_95, abs=1e-4)
    with pytest.raises(ValueError, match="degree"):
        stats.student(0)


def test_the_median() -> None:
    """One wild value does not move it."""
    assert stats.median([3, 1, 2]) == 2
    assert stats.median([1, 1, 2, 2, 4, 6, 900]) == 2
    with pytest.raises(ValueError, match="nothing"):
        stats.median([])


def test_block_interval_holds_the_truth_in_about_95_of_100_runs() -> None:
    """Blocks of normal step times: the interval covers the mean as often as it says."""
    rng = random.Random(7)
    held = 0
    for _ in range(1500):
        blocks = [(n, sum(rng.gauss(0.2, 0.01) for _ in range(n))) for n in (3, 5, 5, 5, 4, 6)]
        interval = stats.interval_of(blocks)
        held += interval.low <= 0.2 <= interval.high
    assert 0.92 <= held / 1500 <= 0.98


def test_interval_of_is_total_time_over_total_steps() -> None:
    """The value weighs each step alike, whatever its block."""
    interval = stats.interval_of([(1, 1.0), (3, 1.5)])
    assert interval.value == pytest.approx(2.5 / 4)
    assert interval.low < interval.value < interval.high


def test_a_lone_block_is_not_believed() -> None:
    """Without a second block the spread is unknown, and the interval says so."""
    assert stats.relative_half_width(stats.interval_of([(10, 1.0)])) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="step"):
        stats.interval_of([])


def test_pairing_cancels_drift() -> None:
    """A common drift over the turns leaves the paired difference tight."""
    drift = [1.0, 1.1, 1.3]
    rng = random.Random(3)
    a = [1.02 * d * (1 + rng.gauss(0, 0.0005)) for d in drift]
    interval = stats.paired(a, drift)
    assert interval.low < 0.02 < interval.high
    assert interval.high - interval.low < 0.01 < statistics.stdev(a)


def test_one_turn_has_no_interval() -> None:
    """A single pair gives a value and no certainty."""
    assert stats.paired([1.1], [1.0]).high == math.inf


def test_pooling_tightens_agreeing_turns_and_widens_disagreeing_ones() -> None:
    """Turns that differ by more than their widths are not averaged into false certainty."""
    same = stats.pooled([stats.Interval(1.0, 0.98, 1.02)] * 4, [1.0] * 4)
    assert same.high - same.low == pytest.approx(0.02)
    apart = stats.pooled([stats.Interval(0.9, 0.89, 0.91), stats.Interval(1.1, 1.09, 1.11)], [1.0, 1.0])
    assert apart.low < 0.9
    assert apart.high > 1.1


def test_a_turn_without_any_spread_does_not_widen_the_rest_beyond_reason() -> None:
    """Two turns 2 % apart, one of them timed without noise: the interval holds both and is no wider than that."""
    joined = stats.pooled([Interval(1.0, 1.0, 1.0), Interval(1.02, 1.019, 1.021)], [1.0, 1.0])
    assert joined.low <= 1.0
    assert joined.high >= 1.02
    assert (joined.high - joined.low) / 2 <= 0.02 * 1.001
