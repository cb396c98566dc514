"""Chooses the batches whose parts are timed. Pure, but for the clock that it is given.

To record an event of a GPU takes a host 5 to 30 us, and a batch has five or six of them: with steps
of 10 ms, timing each would take 1 to 2 % of the host's time. On a CPU, summing up the parts of a
batch takes 3 to 15 us, depending on how much of a core's cache the step leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

BLOCK_BATCHES = 32  # between two choices of the stride; a power of 2. The first ones are all timed
GOLDEN, RANGE = 2654435761, 1 << 32  # multiples of the golden ratio are spread evenly (Knuth, 6.4)


class Rate(NamedTuple):
    """How often batches are timed: one in `seconds`, but at least one of `most_stride` batches."""

    seconds: float
    most_stride: int  # a power of 2


ON_GPU = Rate(0.16, 32)
ON_CPU = Rate(0.04, 8)


class TimedBatches:
    """Chooses one batch of each group of `stride`, at another place in each group.

    So every place in a cycle of batches, such as those of one update, is timed in its turn. The
    choice depends on the batch's number and the stride alone, so that ranks choose the same ones.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stride = 1
        self._rate = rate
        self._clock = clock
        self._block_at = 0.0  # when the newest block began

    def is_timed(self, number: int) -> bool:
        """True if the batch with this number is to be timed; called once for each, in order."""
        if number % BLOCK_BATCHES == 0:
            self._choose_stride()
        part = number // self.stride * GOLDEN % RANGE
        return number % self.stride == part * self.stride // RANGE

    def _choose_stride(self) -> None:
        """Choose the stride for the next block by how long a batch of the last block took."""
        now = self._clock()
        batch_s = (now - self._block_at) / BLOCK_BATCHES
        is_first = not self._block_at
        self._block_at = now
        if is_first:
            return
        stride = 1
        while stride < self._rate.most_stride and stride * batch_s < self._rate.seconds:
            stride *= 2
        self.stride = stride
