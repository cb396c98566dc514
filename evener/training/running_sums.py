"""Total times of a rank's steps, over all steps and over recent ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from operator import add

from .step_sums import StepSums

RECENT_STEPS, RECENT_SECONDS = 25, 10.0  # recent sums cover at least this many steps and seconds
BIN_SECONDS = 1.0  # length of the bins of recent sums
# number of stored step times, and the fraction of them that is quick
MOST_STEPS, QUICK_PART = 4096, 0.05
UNKNOWN_ERROR = 0.5  # relative error of means in a training's first seconds
# minimum number of bins for an error; standard errors in half an interval
FEWEST_BINS, ERRORS = 4, 2.4


class RunningSums:
    """Adds up the times of a rank's steps in seconds, over all steps and over recent ones."""

    # Steps are grouped into bins of about a second. The differences between bins show how precise
    # the means are.

    def __init__(self) -> None:
        self._now = [0.0] * len(StepSums.__struct_fields__)
        self._ends = deque([StepSums()])  # sums of all steps before each of the last bins
        self._bin_s = 0.0  # seconds in the newest bin
        self._step_s = 0.0  # seconds of the step that is being added
        # step times since the last `take_fast_step`
        self._last_s: deque[float] = deque(maxlen=MOST_STEPS)

    @property
    def whole(self) -> StepSums:
        """The total times of all steps."""
        return StepSums(int(self._now[0]), *self._now[1:])

    def add(self, step: Sequence[float], seconds: float, own_s: float | None = None) -> None:
        """Add the times of one step, or of a part of a step.

        - `step`: values for the fields of StepSums, in order: first the number of steps, which is 0
          if the step hasn't ended yet, then the times in seconds.
        - `seconds`: the sum of the times.
        - `own_s`: the measured duration, if the times were scaled up to include steps that weren't
          timed. `take_fast_step` then uses it instead of `seconds`.
        """
        self._now = list(map(add, self._now, step))
        self._bin_s += seconds
        self._step_s += seconds if own_s is None else own_s
        if step[0]:
            self._last_s.append(self._step_s if own_s is not None else self._step_s / step[0])
            self._step_s = 0.0
        if step[0] and self._bin_s >= BIN_SECONDS:
            self._bin_s = 0.0
            whole = self.whole
            self._ends.append(whole)
            while len(self._ends) > 2 and self._is_enough(whole.minus(self._ends[1])):
                self._ends.popleft()

    def take_fast_step(self) -> float:
        """Return the 5th percentile of the step times since the last call, in seconds.

        Returns 0 if there were no steps.
        """
        # the fastest steps were disturbed neither by other programs nor by a checkpoint
        steps = sorted(self._last_s)
        self._last_s.clear()
        return steps[int(QUICK_PART * len(steps))] if steps else 0.0

    def recent(self) -> StepSums:
        """Return the total times of recent steps.

        Recent steps are the last 25 or more, which took at least ten seconds in total. Early in
        training, they are all steps.
        """
        return self.whole.minus(self._ends[0])

    def errors(self) -> StepSums:
        """Return the error margins of the mean times of recent steps, in seconds per step."""
        # A margin is half of the 95 % interval, estimated from the differences between bins of
        # steps. With fewer than FEWEST_BINS bins, it is half of each mean.
        bins = [after.minus(before) for before, after in pairwise(self._ends)]
        bins = [each for each in bins if each.steps]
        names = StepSums.__struct_fields__[1:]
        if len(bins) < FEWEST_BINS:
            recent = self.recent()
            return StepSums(recent.steps, *(UNKNOWN_ERROR * recent.mean(name) for name in names))
        found = (_deviation([each.mean(name) for each in bins]) for name in names)
        return StepSums(len(bins), *(ERRORS * each / math.sqrt(len(bins)) for each in found))

    @staticmethod
    def _is_enough(sums: StepSums) -> bool:
        return sums.steps >= RECENT_STEPS and sums.seconds >= RECENT_SECONDS


def _deviation(values: Sequence[float]) -> float:
    # `statistics.stdev` is 20 times slower, because it computes with fractions.
    middle = sum(values) / len(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))
