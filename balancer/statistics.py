"""Statistics of repeated time measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from .number_format import relative_error
from .types import Interval

NORMAL_95 = 1.959964  # two-sided 95 % quantile of the normal distribution
# a higher correlation of consecutive values can't be estimated from few values
MOST_CORRELATION = 0.8
UNKNOWN = 0.25  # relative error of samples/s above which they aren't compared
# relative standard error of a single step, because its probe can't show its noise: steps of seconds
# vary by 1 or 2 %, and the first timed step may still allocate
LONE_ERROR = 0.03
# number of steps that this assumption counts for, beside one measured difference of two steps,
# which may be small by chance
LONE_WEIGHT = 2
# relative to the next step: a first step that took longer traced or tuned kernels
USUAL = 1.2
# fmt: off
STUDENT_95 = (  # two-sided 95 % quantiles for 1, 2, ... degrees of freedom
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)
# fmt: on


def student(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution.

    The value is exact to four decimals up to 20 degrees of freedom. For more, it is approximated by
    the first term of the expansion in Abramowitz and Stegun, 26.7.5. Raises ValueError for less
    than 1 degree of freedom.
    """
    if degrees_of_freedom < 1:
        raise ValueError(f"Student's t has at least 1 degree of freedom, not {degrees_of_freedom}")
    if degrees_of_freedom <= len(STUDENT_95):
        return STUDENT_95[degrees_of_freedom - 1]
    return NORMAL_95 + (NORMAL_95**3 + NORMAL_95) / (4 * degrees_of_freedom)


def find_correlation(values: Sequence[float]) -> float:
    """Estimate the lag-1 autocorrelation of a series, corrected for the bias of short series.

    The result is at least 0 and at most MOST_CORRELATION.
    """
    middle = fmean(values)
    around = [value - middle for value in values]
    whole = sum(each * each for each in around)
    if whole <= 0:
        return 0.0
    in_a_row = sum(one * following for one, following in pairwise(around))
    # the estimate from few values is too low, by about 1 / n plus four times itself / n
    count = len(values)
    found = in_a_row / whole
    return min(max(0.0, found + (1 + 4 * max(found, 0.0)) / count), MOST_CORRELATION)


def single_step_error(first_seconds: float, seconds: float) -> float:
    """Estimate the error of a step time that comes from a single timed step, which took `seconds`.

    The error is half of the 95 % interval, as a fraction of the step time. It combines a typical
    error with the difference from the untimed first step, which took `first_seconds`. The first
    step is ignored if it was much slower, for example because kernels were compiled.
    """
    # a first step that took over 20 % longer also traced or tuned kernels
    usual = 0 < first_seconds <= USUAL * seconds
    return _pool_step_errors([first_seconds / seconds - 1] if usual else [], 0)


def typical_single_step_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Estimate the usual error of a step time that comes from a single timed step.

    The error is half of the 95 % interval, as a fraction of the step time. `pairs` has, for each
    probe, the seconds of its untimed first step and of its timed step.
    """
    ratios = [first / step - 1 for first, step in pairs if first > 0]
    # first steps may take longer in general
    middle = median(ratios or [0.0])
    return _pool_step_errors([ratio - middle for ratio in ratios], 1)


def _pool_step_errors(differences: Sequence[float], fitted: int) -> float:
    """Estimate the error of a step's time from a typical error and from measured differences.

    `differences` are relative differences between steps. `fitted` is the number of parameters that
    were fitted to them. Returns half of the 95 % interval of a single step, as a fraction of its
    time.
    """
    variance = LONE_WEIGHT * LONE_ERROR**2 + math.fsum(
        difference**2 / 2 for difference in differences
    )
    freedom = LONE_WEIGHT + max(0, len(differences) - fitted)
    return student(freedom) * math.sqrt(variance / freedom)


def relative_half_width(interval: Interval) -> float:
    """Return half of an interval's width relative to its value.

    Returns inf if the value is 0 or less.
    """
    return (interval.high - interval.low) / 2 / interval.value if interval.value > 0 else math.inf


def is_known(*intervals: Interval) -> bool:
    """Return whether all of these throughputs are known precisely enough to be compared."""
    return all(
        relative_error(interval.value, interval.low, interval.high) <= UNKNOWN
        for interval in intervals
    )
