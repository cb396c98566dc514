"""Compares how long quick steps of two trainings take on a core at full speed.

A core is up to half slower while its other hardware thread is busy, for seconds at a time, so equal
steps take unequal times. Each window of a training therefore also has the time that a fixed loop
took on the same core (`evener/system/core_speed.py`).

Step times are compared by an analysis of covariance (Fisher, Statistical Methods for Research
Workers, 1932, chapter 8). The logarithm of a step's time rises linearly with the logarithm of the
loop's time, with a common slope for both trainings. The slope is estimated from the differences
within each training, with a normal prior, as in Bayesian linear regression (Bishop, Pattern
Recognition and Machine Learning, 2006, 3.3).

Different code is slowed differently, so the more a window was corrected, the less certain it is.
Windows at full speed aren't corrected and count most. If a training has none of them, its interval
is wide, so that nothing is claimed.

The functions have no side effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from ..statistics import find_correlation, student

WINDOW_NOISE = 0.03  # relative standard deviation of a window's quick steps at one core speed
ALIKE_WINDOWS = 8  # windows in a row that are alike, and count as one for the slope
FULL_PART = 0.1  # fraction of the windows whose core is faster than full speed
# logarithm of the loop's time: a core this much slower is still at full speed, as the loop's own
# times vary
FULL_RANGE = 0.1
# relative standard deviation of the slope between times and trainings
SLOPE_SPREAD = 0.3
BELOW_ONE_DEVIATION = 0.16  # part of a normal distribution below one deviation under its mean
# the slope to be expected before any window: its mean and standard deviation. A slope of 1 means
# that a step slows as much as the loop does. Steps of layers and of Python on an EPYC had 0.5 to
# 1.1, and steps that wait for a GPU have less.
SLOPE_MEAN, SLOPE_DEVIATION = 0.5, 0.35
MEDIAN_ERROR = 1.253  # standard error of a median, relative to that of a mean


class QuickWindow(NamedTuple):
    """The time per sample of one window's quick steps, and the fixed loop's time.

    The loop's time is 0 if unknown.
    """

    step_s: float  # of a quick step, per sample
    core_s: float  # of the fixed loop


class QuickStep(NamedTuple):
    """The seconds per sample of a training's quick step on a core at full speed.

    `error` is half of its 95 % interval, relative to the duration.
    """

    seconds: float
    error: float


def compare_quick_steps(
    trainings: Sequence[Sequence[QuickWindow]], same_loop: bool
) -> tuple[list[QuickStep], float]:
    """Return each training's quick step at full speed, and the error of the two steps' ratio.

    `trainings` has the windows of two trainings. In each window, a fixed loop measures the speed of
    the core. `same_loop` is False if the loops aren't comparable, for example because the versions
    of Python differ. Each training is then assumed to have had a core at full speed in its fastest
    windows.

    The error comes from correcting the steps for slow cores. It is half of the ratio's 95 %
    interval, as a fraction of the ratio.
    """
    slowed = _find_slowed(trainings, same_loop)
    times = [[math.log(window.step_s) for window in each] for each in trainings]
    slope, slope_error = _fit_slope(times, slowed)
    steps = [_find_step(*each, slope) for each in zip(times, slowed, strict=True)]
    apart = abs(fmean(slowed[0]) - fmean(slowed[1]))
    return steps, 2 * slope_error * apart


def _find_slowed(trainings: Sequence[Sequence[QuickWindow]], same_loop: bool) -> list[list[float]]:
    """Return the logarithm of how much slower each window's core was than at full speed."""
    # 0 if the loop's time is unknown in any window
    if not all(window.core_s > 0 for windows in trainings for window in windows):
        return [[0.0] * len(windows) for windows in trainings]
    logs = [[math.log(window.core_s) for window in windows] for windows in trainings]
    full = [sorted(each)[int(FULL_PART * len(each))] for each in logs]
    if same_loop:
        full = [min(full)] * len(full)
    return [
        [max(0.0, value - limit - FULL_RANGE) for value in each]
        for each, limit in zip(logs, full, strict=True)
    ]


def _fit_slope(
    times: Sequence[Sequence[float]], slowed: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Return the slope of step times against how slow the cores were, and its standard error."""
    # `times` and `slowed` are logarithms
    # only differences within each training count, because trainings may differ
    squares = products = 0.0
    for own_times, own_slowed in zip(times, slowed, strict=True):
        middle, level = fmean(own_slowed), fmean(own_times)
        for value, slow in zip(own_times, own_slowed, strict=True):
            squares += (slow - middle) ** 2
            products += (slow - middle) * (value - level)
    weight = 1 / (ALIKE_WINDOWS * WINDOW_NOISE**2)
    known = 1 / SLOPE_DEVIATION**2
    precision = squares * weight + known
    slope = (products * weight + SLOPE_MEAN * known) / precision
    return max(0.0, slope), 1 / math.sqrt(precision)


def _find_step(times: Sequence[float], slowed: Sequence[float], slope: float) -> QuickStep:
    """Return the duration of a training's quick step on cores at full speed.

    `times` and `slowed` are logarithms.
    """
    spread = SLOPE_SPREAD * slope
    values = [time - slope * slow for time, slow in zip(times, slowed, strict=True)]
    weights = [1 / (WINDOW_NOISE**2 + (spread * slow) ** 2) for slow in slowed]
    # the weighted median of the corrected times
    middle = _find_quantile(values, weights, 0.5)
    # other programs only make windows slower, so the spread is that of the windows below the median
    deviation = middle - _find_quantile(values, weights, BELOW_ONE_DEVIATION)
    alike = find_correlation([min(value, middle + 2 * deviation) for value in values])
    whole = math.fsum(weights)
    count = whole**2 / math.fsum(weight**2 for weight in weights)  # of equal weights (Kish, 1965)
    standard_error = MEDIAN_ERROR * deviation / math.sqrt(count * (1 - alike) / (1 + alike))
    by_chance = student(max(1, round(count) - 1)) * standard_error
    slow = math.fsum(weight * each for weight, each in zip(weights, slowed, strict=True))
    return QuickStep(math.exp(middle), math.hypot(by_chance, 2 * spread * slow / whole))


def _find_quantile(values: Sequence[float], weights: Sequence[float], part: float) -> float:
    """Return the lowest value that reaches the fraction `part` of the total weight."""
    wanted = part * math.fsum(weights)
    below = 0.0
    pairs = sorted(zip(values, weights, strict=True))
    for value, weight in pairs:
        below += weight
        if below >= wanted:
            return value
    return pairs[-1][0]
