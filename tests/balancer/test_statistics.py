"""Intervals cover the true value as often as promised."""

from __future__ import annotations

import random
from statistics import median

import pytest

from evener.balancer import statistics as stats
from evener.balancer.probes.block_timing import Block, step_time_interval


def test_student_meets_the_normal_and_the_table() -> None:
    """Quantiles fall with the degrees of freedom and end at the normal one."""
    values = [stats.student(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(12.706, abs=1e-3)
    assert stats.student(60) == pytest.approx(2.0003, abs=2e-3)
    assert stats.student(10**6) == pytest.approx(stats.NORMAL_95, abs=1e-4)
    with pytest.raises(ValueError, match="degree"):
        stats.student(0)


@pytest.mark.parametrize(
    ("noise", "least"), [(0.005, 0.99), (0.01, 0.98), (0.02, 0.95), (0.05, 0.85), (0.1, 0.8)]
)
def test_a_lone_step_is_as_sure_as_it_says(noise: float, least: float) -> None:
    """For a step and the previous one, with usual noise and more, the interval covers the true
    value.
    """
    rng = random.Random(11)
    held = 0
    for _ in range(1500):
        first, step = (8.0 * rng.gauss(1, noise) for _ in range(2))
        interval = step_time_interval([Block(1, step)], first)
        held += interval.low <= 8.0 <= interval.high
    assert held / 1500 >= least


def test_a_lone_step_is_the_surer_the_nearer_the_one_before_it() -> None:
    """A first step that took far longer traced or tuned, so it shows nothing about the noise."""
    widths = [
        stats.relative_half_width(step_time_interval([Block(1, 8.0)], 8.0 * times))
        for times in (1.0, 1.02, 1.1, 3.0)
    ]
    assert widths[0] < widths[1] < widths[2]
    assert 0.05 < widths[0] < 0.1
    assert widths[3] == stats.relative_half_width(step_time_interval([Block(1, 8.0)]))
    assert 0.1 < widths[3] < 0.15
    assert stats.is_known(step_time_interval([Block(1, 8.0)]))


def test_block_interval_holds_the_truth_in_about_95_of_100_runs() -> None:
    """Blocks of normal step times: the interval covers the mean as often as it says."""
    rng = random.Random(7)
    held = 0
    for _ in range(1500):
        blocks = [Block(n, sum(rng.gauss(0.2, 0.01) for _ in range(n))) for n in (3, 5, 5, 5, 4, 6)]
        interval = step_time_interval(blocks)
        held += interval.low <= 0.2 <= interval.high
    assert 0.92 <= held / 1500 <= 0.98


def test_interval_of_is_total_time_over_total_steps() -> None:
    """The value weighs each step equally, whatever its block."""
    interval = step_time_interval([Block(1, 1.0), Block(3, 1.5)])
    assert interval.value == pytest.approx(2.5 / 4)
    assert interval.low < interval.value < interval.high


def test_an_interval_needs_a_step() -> None:
    with pytest.raises(ValueError, match="step"):
        step_time_interval([])


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15])
@pytest.mark.parametrize("longer", [0.0, 0.3])
def test_many_lone_steps_tell_their_noise_though_first_steps_take_longer(
    noise: float, longer: float
) -> None:
    """Tracing and tuning take equally long in all first steps; ten pairs show the rest."""
    rng = random.Random(5)
    errors = []
    for _ in range(200):
        steps = [8.0 * rng.gauss(1, noise) for _ in range(10)]
        firsts = [8.0 * (1 + longer) * rng.gauss(1, noise) for _ in range(10)]
        errors.append(stats.typical_single_step_error(list(zip(firsts, steps, strict=True))))
    usual = median(errors)
    assert 1.5 * noise < usual < max(3.5 * noise, 0.05)
    assert stats.typical_single_step_error([]) == stats.single_step_error(0.0, 8.0)
