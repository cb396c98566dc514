"""Compares how long quick steps of two trainings take on a CPU core at full speed.

A quick step is shorter than almost all steps of its training. A CPU core is up to half slower while
its other hardware thread is busy, for seconds at a time. So equal steps take unequal times. Almost
every training has moments at full speed. Therefore a training is represented by its fastest
windows: a low percentile of the windows' quick steps.

Each window also has the time of a fixed loop on the same core (`evener/system/core_speed.py`). The
same percentile of these times shows whether the core was at full speed in the fastest windows. The
fastest loop of both trainings defines full speed. A training's steps are corrected if its core was
slower, and its interval is then wider, because different code is slowed differently. If a
training's core was never at full speed, the interval is so wide that a slowdown is rarely certain.

The loop and the quick steps of a single window aren't compared, because both were timed at
different moments. On a machine with 24 cores, the loop was slow in half of the windows whose quick
steps were as fast as any.

The functions have no side effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FAST_PART = 0.1  # fraction of the windows that are faster than the one that counts
# fractions of the windows between which the fastest steps lie; half of their difference is an error
FASTEST_PART, LESS_FAST_PART = 0.0, 0.15
# Logarithm of the loop's time relative to its fastest time: a core this much slower is still at
# full speed, and its clock differs a little.
FULL_RANGE = 0.1
# How much of a core's slowdown a step has: its mean, and its standard deviation at full speed. With
# 1, a step slows as much as the loop does. Steps of layers and of Python had 0.5 to 1.1 on an EPYC.
# Steps that wait for a GPU have less.
SLOPE_MEAN, SLOPE_DEVIATION = 0.6, 0.3
# The standard deviation on slower cores: beside some programs, layers took 1.65 times as long where
# the loop took 1.25 times as long, as the core's units for vectors were busy.
SLOWED_DEVIATION = 1.2


class QuickWindow(NamedTuple):
    """The times of one window: a quick step's, and the fixed loop's.

    The time of the loop is 0 if unknown.
    """

    step_s: float  # of a quick step, per sample
    core_s: float  # of the fixed loop


class QuickStep(NamedTuple):
    """How long a training's quick step takes on a CPU core at full speed.

    A quick step is shorter than almost all steps of its training. `seconds` is its duration per
    sample. `error` is half of the width of the 95 % interval, relative to the duration.
    """

    seconds: float
    error: float


def compare_quick_steps(
    trainings: Sequence[Sequence[QuickWindow]], same_loop: bool
) -> tuple[list[QuickStep], float]:
    """Return each training's quick step at full speed, and an error.

    The error is of the ratio of both steps, and comes from correcting them for slow cores. It is
    half of the width of the 95 % interval, as a fraction of the ratio.

    `trainings` has the windows of two trainings. In each window, a fixed loop measures the speed of
    the CPU core. With `same_loop`, the loop takes equally long in both trainings on equally fast
    cores. Otherwise, for example with another version of Python, the cores are assumed to be
    equally fast.
    """
    slowed = _find_slowed(trainings, same_loop)
    steps = []
    for windows, slow in zip(trainings, slowed, strict=True):
        times = [math.log(window.step_s) for window in windows]
        seconds = math.exp(_find_quantile(times, FAST_PART) - SLOPE_MEAN * slow)
        apart = _find_quantile(times, LESS_FAST_PART) - _find_quantile(times, FASTEST_PART)
        by_core = 2 * SLOWED_DEVIATION * max(0.0, slow - FULL_RANGE)
        steps.append(QuickStep(seconds, math.hypot(apart / 2, by_core)))
    clocks = [min(slow, FULL_RANGE) for slow in slowed]
    return steps, 2 * SLOPE_DEVIATION * (max(clocks) - min(clocks))


def _find_slowed(trainings: Sequence[Sequence[QuickWindow]], same_loop: bool) -> list[float]:
    """Return how slow each training's core was at best, as logarithms."""
    if not same_loop or not all(window.core_s > 0 for training in trainings for window in training):
        return [0.0] * len(trainings)
    logs = [[math.log(window.core_s) for window in windows] for windows in trainings]
    # the shortest loop of both trainings is full speed
    full = min(map(min, logs))
    return [_find_quantile(log, FAST_PART) - full for log in logs]


def _find_quantile(values: Sequence[float], part: float) -> float:
    """Return a quantile of the values, interpolated linearly."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
