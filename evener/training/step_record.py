"""Compare the step times of a training run with its first shares and with its last shares.

Only undisturbed steps count. The first steps with new shares (warm-up) are disturbed, because
libraries choose kernels and the memory allocator grows. Steps in which evener checks the loss or
memory runs out are disturbed, too. Steps are called faster or slower only if the whole 95 %
interval of the gain is at least 2 % away from 0.

Devices may have become faster or slower in the meantime. Therefore, the compute times (own work) at
the end are used to predict how long steps with the first shares would take now. If that differs too
much from how long they took at first, the step times can't be compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Literal

import msgspec

WARM_STEPS = 3  # number of warm-up steps with new shares, which don't count
FEWEST_STEPS = 5  # minimum number of undisturbed steps for shares to count
KEPT_STEPS = 200  # maximum number of stored steps for the first and for the last shares
TOGETHER = 4  # number of consecutive steps that are slow or fast together
ERRORS = 2.0  # standard errors on each side of an interval
LEAST_ERROR = 1e-3  # minimum relative error, from clocks and differences between any two trainings
LEAST_GAIN = 0.02
SAME_SPEED = 0.1  # relative difference of step times up to which own work explains them

Outcome = Literal["same shares", "faster", "slower", "unclear", "not comparable"]


class ShareTimes(msgspec.Struct, frozen=True):
    """Median times of one rank's steps with certain shares, in seconds.

    Unknown times are 0.
    """

    shares: tuple[int, ...]  # of every rank
    own_work_s: float
    step_s: float
    error_s: float = 0.0  # standard error of step_s


class Comparison(msgspec.Struct, frozen=True):
    """How much faster steps are with the last shares than with the first shares.

    `low` and `high` are the bounds of the gain's 95 % interval.
    """

    outcome: Outcome
    gain: float = 0.0  # 0.12: 12 % more steps a second
    low: float = 0.0  # lower bound of the gain
    high: float = 0.0


class _ShareSpan:
    """One rank's step times in a period in which the shares didn't change."""

    def __init__(self, shares: tuple[int, ...], steps: int = 0) -> None:
        self.shares, self.steps = shares, steps
        # (own work, whole step) of every step
        self.all: deque[tuple[float, float]] = deque(maxlen=KEPT_STEPS)
        # the same for undisturbed steps
        self.clear: deque[tuple[float, float]] = deque(maxlen=KEPT_STEPS)

    def summarize(self) -> ShareTimes:
        enough = len(self.clear) >= FEWEST_STEPS
        steps = list(self.clear if enough else self.all)
        own = [each for each, _ in steps if not math.isnan(each)]
        whole = [each for _, each in steps if not math.isnan(each)]
        return ShareTimes(
            self.shares,
            median(own) if own else 0.0,
            median(whole) if whole else 0.0,
            _error(whole) if enough else 0.0,
        )


class StepRecord:
    """Records a rank's step times with the first shares and with the last ones."""

    def __init__(self) -> None:
        self.changes = 0  # number of changes since the first shares that had enough steps
        self._first: _ShareSpan | None = None
        self._last: _ShareSpan | None = None
        self._now: _ShareSpan | None = None

    def add(
        self, shares: tuple[int, ...], own_work_s: float, step_s: float, disturbed: bool
    ) -> None:
        """Add a step's compute time and its total duration, both in seconds; NaN if unknown.

        `disturbed` is True if the step was slow for another reason, such as a check of the loss.
        """
        # a disturbed step counts only if there are too few others
        if self._now is None or shares != self._now.shares:
            self.changes += self._first is not None
            self._now = _ShareSpan(shares)
        now = self._now
        now.steps += 1
        now.all.append((own_work_s, step_s))
        if disturbed or now.steps <= WARM_STEPS:
            return
        now.clear.append((own_work_s, step_s))
        if len(now.clear) < FEWEST_STEPS:
            return
        self._last = now
        if self._first is None:
            self._first = now
        elif now is self._first and len(now.clear) == KEPT_STEPS:
            # the first span isn't extended any further
            self._now = _ShareSpan(shares, now.steps)

    @property
    def first(self) -> ShareTimes | None:
        """This rank's times with the earliest shares that had at least five undisturbed steps.

        If no shares were used for that long, these are the times with the current shares. None
        before the first step.
        """
        stretch = self._first or self._now
        return None if stretch is None else stretch.summarize()

    @property
    def last(self) -> ShareTimes | None:
        """This rank's times with the latest shares that had at least five undisturbed steps.

        If no shares were used for that long, these are the times with the current shares. None
        before the first step.
        """
        stretch = self._last or self._now
        return None if stretch is None else stretch.summarize()


def compare(first: Sequence[ShareTimes], last: Sequence[ShareTimes]) -> Comparison:
    """Compare the speed of training with the last shares to its speed with the first shares.

    `first` and `last` contain the times of each rank. The outcome is "not comparable" if the speed
    of the devices themselves has changed.
    """
    # the gain is computed from the first rank's steps, because all ranks have the same step time
    before, after = first[0], last[0]
    expected = _gain_at_present_speed(first, last)
    if expected is None or not (before.error_s and after.error_s):
        return Comparison("same shares" if before.shares == after.shares else "unclear")
    gain = before.step_s / after.step_s - 1
    error = math.hypot(before.error_s / before.step_s, after.error_s / after.step_s)
    low, high = gain - ERRORS * error * (1 + gain), gain + ERRORS * error * (1 + gain)
    if abs(math.log((1 + gain) / (1 + expected))) > SAME_SPEED + ERRORS * error:
        return Comparison("not comparable")
    if before.shares == after.shares:
        return Comparison("same shares")
    if low >= LEAST_GAIN:
        return Comparison("faster", gain, low, high)
    return Comparison("slower" if high <= -LEAST_GAIN else "unclear", gain, low, high)


def _gain_at_present_speed(first: Sequence[ShareTimes], last: Sequence[ShareTimes]) -> float | None:
    """Return the gain of the last shares over the first ones, at the present speed of the devices.

    It is predicted from the ranks' latest compute times. Returns None if one of them is unknown.
    """
    # The time of steps with the first shares is predicted from the newest compute times. These are
    # assumed to be proportional to the rows, and the rest of a step's time to be the same.
    now, then = [], []
    for rank, metrics in enumerate(last):
        if metrics.own_work_s <= 0:
            return None
        now.append(metrics.own_work_s)
        then.append(metrics.own_work_s * first[0].shares[rank] / metrics.shares[rank])
    rest = max(0.0, last[0].step_s - max(now))
    return (max(then) + rest) / (max(now) + rest) - 1


def _error(steps: Sequence[float]) -> float:
    """Return the standard error of the median step time in seconds.

    Returns 0 if there are too few steps.
    """
    # consecutive steps are correlated, so each group of TOGETHER steps counts as a single step
    if len(steps) < FEWEST_STEPS:
        return 0.0
    low, _, high = quantiles(steps)
    deviation = (high - low) / 1.349
    error = 1.253 * deviation / math.sqrt(len(steps) / TOGETHER)
    return max(error, LEAST_ERROR * median(steps))
