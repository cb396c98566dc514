"""Choose which batches a step timer measures, because measuring takes host time.

Recording a GPU event takes the host 5 to 30 us, and a batch has five or six events. That is 1 to 2
% of a step of 10 ms. On a CPU, adding up a batch's phases takes 3 to 15 us. It takes longer if the
step has replaced more of the CPU's cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

# number of batches per stride; a power of 2. All batches of the first block are timed
BLOCK_BATCHES = 32
GOLDEN, RANGE = 2654435761, 1 << 32  # multiples of the golden ratio are spread evenly (Knuth, 6.4)


class Rate(NamedTuple):
    """How often to time a batch.

    A batch is timed about every `seconds` seconds, and at least one of every `most_stride` batches.
    """

    seconds: float
    most_stride: int  # a power of 2


ON_GPU = Rate(0.16, 32)
ON_CPU = Rate(0.08, 8)
IF_HOST_LIMITS = Rate(2.0, 8)


class TimedBatches:
    """Chooses which batches are timed: one in each group of `stride` consecutive batches.

    `stride` is `first_stride` at first, and is then adapted to `rate`. `clock` returns seconds.
    """

    # The timed position differs from group to group. So if batches form a cycle, such as those of
    # one update, each of them is timed sooner or later. The choice depends on the batch's number
    # and the stride only, so ranks with the same stride choose the same batches.

    def __init__(
        self,
        rate: Rate,
        clock: Callable[[], float] = time.perf_counter,
        first_stride: int = 1,
    ) -> None:
        self.stride = first_stride
        self._rate = rate
        self._clock = clock
        self._block_at = 0.0  # the clock's seconds at the start of the newest block

    def is_timed(self, number: int) -> bool:
        """Return whether to time the batch with this number.

        The numbers have to increase between calls. Numbers may be skipped, except those that
        `find_next` returns.
        """
        if number % BLOCK_BATCHES == 0:
            self._choose_stride()
        return self._is_chosen(number)

    def find_next(self, number: int) -> int:
        """Return the number of the next batch for which `is_timed` must be called."""
        # the next timed batch, or the first of the next block, where the stride may change
        group = (number + 1) // self.stride
        chosen = self._find_chosen(group)
        if chosen <= number:
            chosen = self._find_chosen(group + 1)
        next_block = number - number % BLOCK_BATCHES + BLOCK_BATCHES
        return chosen if chosen < next_block else next_block

    def _find_chosen(self, group: int) -> int:
        """Return the number of the batch that is timed in the group with this index."""
        part = group * GOLDEN % RANGE
        return group * self.stride + part * self.stride // RANGE

    def _is_chosen(self, number: int) -> bool:
        return number == self._find_chosen(number // self.stride)

    def _choose_stride(self) -> None:
        """Choose how many batches are in a group, based on the duration of the latest batches."""
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
