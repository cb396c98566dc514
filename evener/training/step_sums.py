"""Times of training steps, added up by activity.

A step consists of loading input, computing, waiting for other ranks, the all-reduce of gradients,
and the time until the next batch. The times of a single rank don't show how much of a wait is the
all-reduce itself, so `divide_steps` compares all ranks. Totals are used rather than medians, so
that rare work such as a checkpoint counts, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Steps = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class StepSums(msgspec.Struct, frozen=True):
    """Total times of a rank's steps in seconds, by activity."""

    # The fields don't overlap, except that `idle_input_s` and `idle_own_s` are parts of `input_s`
    # and `own_work_s`.

    steps: Steps = 0
    input_s: Seconds = 0.0  # until the batch is available
    own_work_s: Seconds = 0.0  # from there until the last gradient is ready
    meeting_s: Seconds = 0.0  # from there until all gradients are exchanged
    undivided_s: Seconds = 0.0  # own work and exchange, if ranks synchronize within a pass
    update_s: Seconds = 0.0  # the optimizer's step and its preparation, such as clipping
    files_s: Seconds = 0.0  # between steps, while files were written
    validation_s: Seconds = 0.0  # between steps, while the model was validated
    between_s: Seconds = 0.0  # the rest of the time between steps
    idle_input_s: Seconds = 0.0  # part of input in which the loop's thread didn't compute
    # part of own work on a CPU in which no thread of the process computed
    idle_own_s: Seconds = 0.0

    @property
    def seconds(self) -> float:
        """Total time of the steps in seconds."""
        work_s = self.input_s + self.own_work_s + self.meeting_s + self.undivided_s
        return work_s + self.all_between_s

    @property
    def all_between_s(self) -> float:
        """Total time from the end of each gradient exchange to the next step, in seconds."""
        return self.update_s + self.files_s + self.validation_s + self.between_s

    @property
    def step_s(self) -> float:
        """Mean time of a step in seconds, or 0 if there are no steps."""
        return self.seconds / self.steps if self.steps else 0.0

    def mean(self, name: str) -> float:
        """Return a field's mean per step in seconds, or 0 if there are no steps."""
        return float(getattr(self, name)) / self.steps if self.steps else 0.0

    def plus(self, other: StepSums) -> StepSums:
        """Return these totals plus `other`."""
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return StepSums(*(one + more for one, more in zip(mine, others, strict=True)))

    def minus(self, earlier: StepSums) -> StepSums:
        """Return the difference between these totals and earlier ones, with no field below 0."""
        mine, before = msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)
        return StepSums(*(max(0, one - less) for one, less in zip(mine, before, strict=True)))


class RankStep(NamedTuple):
    """The parts of a rank's mean step, in seconds."""

    input_s: float
    own_work_s: float  # includes `undivided_s`
    waiting_s: float
    exchange_s: float
    between_s: float

    @property
    def step_s(self) -> float:
        """Duration of the whole step in seconds."""
        return sum(self)


def divide_steps(ranks: Sequence[StepSums], least_meeting_s: Sequence[float]) -> list[RankStep]:
    """Divide each rank's mean step into its parts, with waiting separate from the all-reduce.

    `least_meeting_s` has, for each rank, the shortest time from its last gradient to the end of the
    all-reduce, in seconds.
    """
    # The smallest of these times counts as the exchange of every rank, because even the last rank
    # needs that long. The rest of a rank's mean `meeting_s` is waiting.
    means = [rank.mean("meeting_s") for rank in ranks]
    known = [least for least, mean in zip(least_meeting_s, means, strict=True) if mean > 0]
    exchange_s = min(known, default=0.0)
    parts = []
    for each, mean in zip(ranks, means, strict=True):
        own_exchange_s = min(exchange_s, mean)
        own_s = each.mean("own_work_s") + each.mean("undivided_s")
        between_s = each.mean("all_between_s")
        parts.append(
            RankStep(each.mean("input_s"), own_s, mean - own_exchange_s, own_exchange_s, between_s)
        )
    return parts
