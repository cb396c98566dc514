"""Intervals hold what they promise."""

from __future__ import annotations

import random

import pytest

from evener.balancer import statistics as stats
from evener.balancer.probes.block_timing import Block, interval_of


def test_student_meets_the_normal_and_the_table() -> None:
    """Quantiles fall with the degrees of freedom and end at the normal one."""
    values = [stats.student(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(12.706, abs=1e-3)
    assert stats.student(60) == pytest.approx(2.0003, abs=2e-3)
    assert stats.student(10**6) == pytest.approx(stats.NORMAL_95, abs=1e-4)
    with pytest.raises(ValueError, match="degree"):
        stats.student(0)


def test_one_timed_step_is_certain_to_a_half() -> None:
    interval = interval_of([Block(1, 0.2)])
    assert (interval.low, interval.value, interval.high) == pytest.approx((0.1, 0.2, 0.3))


def test_block_interval_holds_the_truth_in_about_95_of_100_runs() -> None:
    """Blocks of normal step times: the interval covers the mean as often as it says."""
    rng = random.Random(7)
    held = 0
    for _ in range(1500):
        blocks = [Block(n, sum(rng.gauss(0.2, 0.01) for _ in range(n))) for n in (3, 5, 5, 5, 4, 6)]
        interval = interval_of(blocks)
        held += interval.low <= 0.2 <= interval.high
    assert 0.92 <= held / 1500 <= 0.98


def test_interval_of_is_total_time_over_total_steps() -> None:
    """The value weighs each step alike, whatever its block."""
    interval = interval_of([Block(1, 1.0), Block(3, 1.5)])
    assert interval.value == pytest.approx(2.5 / 4)
    assert interval.low < interval.value < interval.high


def test_a_lone_block_is_not_believed() -> None:
    """Without a second block the spread is unknown, and the interval says so."""
    assert stats.relative_half_width(interval_of([Block(10, 1.0)])) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="step"):
        interval_of([])
