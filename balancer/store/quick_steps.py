"""Compares the quick steps of two training runs as if their CPU cores had run at full speed.

A quick step is shorter than almost all steps of its training run. While the other hardware thread
of a CPU core is busy, equal steps take up to 70 % longer, for seconds at a time. Almost every
training run has moments at full speed, so a run is represented by its fastest windows: a low
percentile of the windows' quick steps.

Each window also has the time of a fixed matrix product on the same core
(`evener/system/core_speed.py`). The same percentile of these times shows whether the core was at
full speed in the fastest windows. The fastest product of the two runs defines full speed. A run's
steps are corrected if its core was slower. Not all steps slow down as much as the core does: steps
that wait for a GPU don't slow down at all. The correction is therefore estimated from the windows
of both runs. The interval is then wider, because different code is slowed differently. If a run's
core was never at full speed, the interval is so wide that a slowdown is rarely certain.

The product and the quick steps of a single window aren't compared, because they were timed at
different moments. On a machine whose 44 CPUs were all busy, correcting each window on its own gave
means that differed by 4 to 6 % between equal runs of a minute; the corrected fastest windows
differed by 2 %.

The functions have no side effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

FAST_PART = 0.03  # fraction of the windows that are faster than the one that counts
# fractions of the windows between which the fastest steps lie; half of their difference is an error
FASTEST_PART, LESS_FAST_PART = 0.0, 0.08
# Logarithm of the product's time relative to its fastest time: a core this much slower is still at
# full speed, and its clock differs a little.
FULL_RANGE = 0.1
# How much of a core's slowdown a step has, before any windows are known: its mean, and its standard
# deviation. With 1, a step slows as much as the product does. Steps of layers had 0.7 to 1 on a
# Xeon. Steps that wait for a GPU have none.
SLOPE_MEAN, SLOPE_DEVIATION = 0.6, 0.3
# The standard deviation on slower cores, whose other hardware threads run unlike programs.
SLOWED_DEVIATION = 0.9
# standard deviation of a window's product beside the core's speed: both are timed at other moments
PRODUCT_NOISE = 0.05
# number of consecutive windows that are alike, because a disturbance lasts for several
ALIKE_WINDOWS = 4


class QuickWindow(NamedTuple):
    """Timings of one window of training steps: a quick step, and a fixed matrix product.

    The product was timed between the steps, to measure the speed of the CPU core. Both times are in
    seconds.
    """

    step_s: float  # of a quick step, per sample
    core_s: float  # of the fixed product


class QuickStep(NamedTuple):
    """How long a quick step of a training run would take on a CPU core at full speed.

    `seconds` is the time per row. `error` is the error of that time, as a fraction of it.
    """

    seconds: float
    error: float


class Slope(NamedTuple):
    """How much steps slow down on a slower core, relative to a fixed matrix product.

    1 means that steps slow down as much as the product. 0 means that they don't slow down at all,
    like steps that wait for a GPU.
    """

    mean: float
    deviation: float  # standard deviation


def compare_quick_steps(
    trainings: Sequence[Sequence[QuickWindow]], same_product: bool
) -> tuple[list[QuickStep], float]:
    """Return how long a quick step of each of two runs would take on a CPU core at full speed.

    The second value is the uncertainty that the correction for core speeds adds to the ratio of the
    two times: half of a 95 % interval, as a fraction. If `same_product` is False, the runs timed
    different matrix products, for example because their versions of numpy differ. Their cores'
    speeds can't be compared then, so no correction is made.
    """
    slowed = _find_core_slowdowns(trainings, same_product)
    slope = find_slope(trainings) if any(slowed) else Slope(0.0, 0.0)
    steps = []
    for windows, slow in zip(trainings, slowed, strict=True):
        times = [math.log(window.step_s) for window in windows]
        seconds = math.exp(_find_quantile(times, FAST_PART) - slope.mean * slow)
        apart = _find_quantile(times, LESS_FAST_PART) - _find_quantile(times, FASTEST_PART)
        by_core = 2 * SLOWED_DEVIATION * max(0.0, slow - FULL_RANGE)
        steps.append(QuickStep(seconds, math.hypot(apart / 2, by_core)))
    clocks = [min(slow, FULL_RANGE) for slow in slowed]
    return steps, 2 * slope.deviation * (max(clocks) - min(clocks))


def _find_core_slowdowns(
    trainings: Sequence[Sequence[QuickWindow]], same_product: bool
) -> list[float]:
    """Return how much slower each run's core was than the fastest one, as the log of a ratio.

    Returns 0 for all runs if the speeds of their cores can't be compared.
    """
    if not same_product or not all(
        window.core_s > 0 for training in trainings for window in training
    ):
        return [0.0] * len(trainings)
    logs = [[math.log(window.core_s) for window in windows] for windows in trainings]
    # the shortest loop of both trainings is full speed
    full = min(map(min, logs))
    return [_find_quantile(log, FAST_PART) - full for log in logs]


def find_slope(trainings: Sequence[Sequence[QuickWindow]]) -> Slope:
    """Estimate how much steps slow down on a slower core, relative to a fixed matrix product.

    This is a regression of the logarithm of the step time on the logarithm of the product's time,
    with a common slope for all runs (analysis of covariance; Snedecor and Cochran, Statistical
    Methods, chapter 18). It is corrected for the noise of the product's time. The result is
    combined with a prior, weighted by precision (Gelman et al., Bayesian Data Analysis, section
    2.5).
    """
    steps = [step for windows in trainings for step in _center([each.step_s for each in windows])]
    cores = [core for windows in trainings for core in _center([each.core_s for each in windows])]
    freedom = len(cores) - len(trainings) - 1
    # only what the core's speed adds to the noise tells how steps follow it (correction for
    # attenuation; Fuller, Measurement Error Models, section 1.2)
    spread = math.fsum(core * core for core in cores) - PRODUCT_NOISE**2 * len(cores)
    if spread <= 0 or freedom < 1:
        return Slope(SLOPE_MEAN, SLOPE_DEVIATION)
    fitted = math.fsum(step * core for step, core in zip(steps, cores, strict=True)) / spread
    rest = math.fsum((step - fitted * core) ** 2 for step, core in zip(steps, cores, strict=True))
    # steps that differ by less than the noise tell no more
    variance = max(rest / freedom, PRODUCT_NOISE**2) * ALIKE_WINDOWS / spread
    known, found = SLOPE_DEVIATION**-2, 1 / variance
    mean = (known * SLOPE_MEAN + found * fitted) / (known + found)
    return Slope(mean, (known + found) ** -0.5)


def _center(values: Sequence[float]) -> list[float]:
    """Return the logarithms of the values, minus the mean of these logarithms."""
    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    return [log - mean for log in logs]


def _find_quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile with linear interpolation; `fraction` is from 0 to 1."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
