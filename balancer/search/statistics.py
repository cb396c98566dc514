"""Order statistics and 95 % intervals of step times: what timing blocks and the race are judged by.

Student's t is tabulated, since SciPy is not a dependency; beyond the table a Cornish-Fisher term gives three digits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..types import Interval, Timed

NORMAL_95 = 1.959964  # two-sided 95 % quantile of the normal distribution
TYPICAL_BLOCKS = 8  # of a probe; turns the half-width of its interval into a standard error
LONE_BLOCK = 0.5  # relative half-width said of a single block, whose spread is unknown
# fmt: off
STUDENT_95 = (  # two-sided 95 % quantiles for 1, 2, ... degrees of freedom
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)
# fmt: on


def student(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; `freedom` is at least 1."""
    if freedom < 1:
        raise ValueError(f"Student's t has at least 1 degree of freedom, not {freedom}")
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    return NORMAL_95 + (NORMAL_95**3 + NORMAL_95) / (4 * freedom)


def median(values: Sequence[float]) -> float:
    """The middle value; ValueError for none."""
    if not values:
        raise ValueError("the median of nothing")
    return float(statistics.median(values))


def interval_of(blocks: Sequence[tuple[int, float]]) -> Interval:
    """Seconds per step from timed blocks of (steps, seconds), by Student's t on block means.

    The value is total time over total steps, so blocks may differ in length. A lone block is said to be within ±50 %.
    """
    steps = sum(count for count, _ in blocks)
    if steps <= 0:
        raise ValueError("an interval needs at least one timed step")
    value = math.fsum(seconds for _, seconds in blocks) / steps
    if len(blocks) < 2:
        return Interval(value, value * (1 - LONE_BLOCK), value * (1 + LONE_BLOCK))
    weighted = math.fsum(count * (seconds / count - value) ** 2 for count, seconds in blocks if count)
    error = math.sqrt(weighted / (len(blocks) - 1) / steps)
    half = student(len(blocks) - 1) * error
    return Interval(value, max(0.0, value - half), value + half)


def relative_half_width(interval: Interval) -> float:
    """Half the interval's width over its value; infinite for a value of 0."""
    return (interval.high - interval.low) / 2 / interval.value if interval.value > 0 else math.inf


def relative_error(seen: Timed) -> float:
    """Relative standard error of a step time, from its 95 % interval."""
    half = (seen.high_seconds - seen.low_seconds) / 2
    return half / seen.step_seconds / student(TYPICAL_BLOCKS - 1) if seen.step_seconds > 0 else 1.0


def normal_density(x: float) -> float:
    """The standard normal density."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def normal_cdf(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
