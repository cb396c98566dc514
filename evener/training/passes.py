"""The passes of a rank's batch: their rows, their weights, and retries when memory runs out.

A pass is one forward and backward computation (a micro-batch). A rank whose rows don't fit in
memory at once computes them in several passes. The weighted sum of the passes' gradients is the
gradient of the rank's mean loss. If a pass runs out of memory, its rows are computed again in
smaller passes:

    sizes = divide_rows(rows, max_rows)        # `max_rows` is from the plan
    queue = PassQueue(sizes, limit)
    while (turn := queue.take()) is not None:
        ...                                    # compute turn.rows rows of pass turn.number
        queue.complete()                       # or limit.halve(turn.rows) and queue.retry()

The rules are the same for every trainer and framework: the user's own training loops
(`evener/torch/step`), transformers' Trainer, Lightning and Keras. The adapter for each of them has
to undo the failed attempt before the retry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import DeviceError
from ..shares.whole_rows import bounds, count_passes, even, split_passes

CLEAN_STEPS = 200  # number of steps after which a pass with twice the rows is tried again
LOOK_STEPS = 10  # number of steps between checks whether other processes have freed memory
MOST_FAILURES = 20  # maximum consecutive failures of a pass that can't be smaller


def divide_rows(rows: int, max_rows: int, passes: int = 0) -> tuple[int, ...]:
    """Divide a rank's rows into passes of at most `max_rows` rows, and return the rows of each.

    If `passes` is above 0, the rows are divided into that many passes instead. Returns (0,) if
    there are no rows.
    """
    # a rank without rows has one empty pass, in which it only takes part in collectives
    if passes:
        return even(rows, passes)
    return split_passes(rows, max_rows) or (0,)


def count_smaller_passes(rows: int, max_rows: int, min_rows: int = 1) -> int:
    """Return how many passes are needed so that none has more than `max_rows` rows.

    No pass has fewer than `min_rows` rows, even if passes then have more than `max_rows`.
    """
    return max(1, min(count_passes(rows, max_rows), rows // min_rows))


def count_equal_passes(rows: Sequence[int], max_rows: Sequence[int]) -> int:
    """Return how many passes every rank should take, so that no pass exceeds its rank's limit.

    All ranks take the same number of passes. `rows` are the rows of each rank in a step, and
    `max_rows` are the ranks' limits in rows per pass.
    """
    return max(1, *map(count_passes, rows, max_rows))


def weigh_passes(sizes: Sequence[int], total: int | None = None) -> tuple[float, ...]:
    """Return the weight of each pass in the batch's mean loss.

    `sizes` are the rows of the passes. `total` is the number of rows in the batch, by default the
    sum of `sizes`. If the batch has no rows, all weights are 1.
    """
    rows = sum(sizes) if total is None else total
    return tuple(own / rows if rows else 1.0 for own in sizes)


class Pass(NamedTuple):
    """A forward and backward pass over some rows of a batch.

    It is either a pass as planned or, after memory ran out, a smaller piece of such a pass.
    """

    number: int  # index of the plan's pass in the batch, from 0
    start: int  # first row within that pass
    rows: int  # rows that count; 0 if the rank only takes part in collectives
    planned: int  # rows of the plan's pass
    ends: bool  # this is the last piece of the plan's pass
    last: bool  # this is the last pass of the batch

    @property
    def stop(self) -> int:
        """The index after this piece's last row, counted from the first row of the planned pass."""
        return self.start + self.rows

    @property
    def part(self) -> float:
        """The fraction of the planned pass's rows that this piece computes."""
        return self.rows / self.planned if self.planned else 1.0


class PassLimit:
    """The maximum number of rows per pass on a rank.

    It is halved when memory runs out, and doubled after 200 steps in which it didn't.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.step = 0  # number of batches that have begun
        self.most: int | None = None  # maximum rows per pass since memory ran out; None: the plan's
        self.predicted: int | None = None  # rows that memory is predicted to fit; None: all
        self._clean_steps = 0  # number of steps since a pass ran out of memory
        self._failures = 0  # number of consecutive failures of passes that can't be smaller
        self._others_bytes = 0  # bytes that other processes held when memory last ran out

    @property
    def lowest(self) -> int | None:
        """The maximum number of rows per pass, or None if there is no limit.

        It is the lower of two limits: one set after passes ran out of memory, and one from the
        predicted memory use.
        """
        known = [each for each in (self.most, self.predicted) if each is not None]
        return min(known, default=None)

    def begin_batch(self, others_bytes: Callable[[], int] = int) -> None:
        """Start a batch. After 200 batches without running out of memory, the limit is doubled.

        `others_bytes` returns the device memory that other processes use, in bytes. The limit is
        removed once they have freed most of it.
        """
        # If other processes used 1 GiB or more when a pass ran out of memory, `others_bytes` is
        # called again in every tenth step. Once they use less than half as much, the limit is
        # removed.
        self.step += 1
        self._clean_steps += 1
        if self.most is None:
            return
        looks = self._others_bytes >= 2**30 and self._clean_steps % LOOK_STEPS == 0
        if looks and others_bytes() < self._others_bytes / 2:
            self.most = None
        elif self._clean_steps > CLEAN_STEPS:
            self.most = 2 * self.most
            self._clean_steps = 0

    def count(self, rows: int, max_rows: int, min_rows: int = 1) -> int:
        """Return how many passes to divide `rows` rows into.

        A pass has at most `max_rows` rows, or fewer if memory has run out, but at least `min_rows`.
        """
        held = max_rows if self.most is None else min(max_rows, self.most)
        return count_smaller_passes(rows, held, min_rows)

    def complete(self) -> None:
        """Record that a pass had enough memory."""
        self._failures = 0

    def count_failure(self, rows: int, min_rows: int, memory_use: str) -> None:
        """Record that a pass of `rows` rows ran out of memory.

        `min_rows` is the smallest size of a pass. `memory_use` describes what uses the memory, for
        the error message. Raises DeviceError after 20 consecutive failures of passes that are too
        small to divide.
        """
        if rows < 2 * min_rows:
            self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise DeviceError(
                f"Rank {self._rank} ran out of memory {self._failures} times in a row with a "
                f"pass of {rows} rows that can't be smaller: {memory_use}.",
                (
                    "Take a smaller model, shorter rows or activation checkpointing, or leave the "
                    "device out of the plan."
                ),
            )

    def halve(self, rows: int, min_rows: int, others_bytes: int = 0) -> int:
        """Halve the limit after a pass of `rows` rows ran out of memory, and return the new limit.

        The limit isn't lowered below `min_rows`. `others_bytes` is the device memory that other
        processes use, in bytes.
        """
        self.most = max(min_rows, rows // 2)
        self._clean_steps = 0
        self._others_bytes = others_bytes
        return self.most


class _Range(NamedTuple):
    """Consecutive rows of one pass of the plan that still have to be computed."""

    number: int
    start: int
    stop: int
    # The range of the failed pass that contains these rows, if it had sent some of its sums.
    failed: tuple[int, int, int] | None = None


class PassQueue:
    """The passes of one batch that a rank still has to compute.

    `sizes` are the rows of the plan's passes, which are divided further if they exceed `limit`.
    Call either `complete` or `retry` after each pass that `take` returns.
    """

    def __init__(self, sizes: Sequence[int], limit: PassLimit) -> None:
        self._sizes = tuple(sizes)
        self._limit = limit
        self._left = deque(_Range(number, 0, size) for number, size in enumerate(sizes))
        self._taken: _Range | None = None

    def take(self, min_rows: Callable[[], int] = lambda: 1) -> Pass | None:
        """Return the next pass, or None after the last one.

        A pass with more rows than the limit is divided into pieces. `min_rows` returns the smallest
        number of rows that a piece may have.
        """
        if not self._left:
            return None
        most = self._limit.lowest
        if most is not None:
            self._cut_first(most, min_rows)
        taken = self._taken = self._left.popleft()
        ends = not self._left or self._left[0].number != taken.number
        rows = taken.stop - taken.start
        planned = self._sizes[taken.number]
        return Pass(taken.number, taken.start, rows, planned, ends, not self._left)

    def _cut_first(self, max_rows: int, min_rows: Callable[[], int]) -> None:
        """Divide the next pass into pieces of at most `max_rows` rows.

        No piece has fewer than `min_rows()` rows, even if pieces then have more than `max_rows`.
        """
        first = self._left[0]
        rows = first.stop - first.start
        if rows <= max_rows:
            return
        self._left.popleft()
        pieces = bounds(even(rows, count_smaller_passes(rows, max_rows, min_rows())))
        for start, stop in reversed(pieces):
            cut = first._replace(start=first.start + start, stop=first.start + stop)
            self._left.appendleft(cut)

    def complete(self) -> bool:
        """Record that the pass returned by `take` succeeded.

        Returns False if it is a piece of a pass that ran out of memory, and other pieces of that
        pass still have to be computed.
        """
        taken, self._taken = self._taken, None
        assert taken is not None
        if taken.failed is not None and self._left and self._left[0].failed == taken.failed:
            return False
        self._limit.complete()
        return True

    def retry(self, is_whole: bool = True) -> None:
        """Put the pass that `take` returned back into the queue, because it ran out of memory.

        `complete` then returns False until all rows of this pass are computed. Set `is_whole` to
        False if the pass is only a piece of a pass that failed earlier. Then `complete` returns
        False until all rows of that earlier pass are computed.
        """
        taken, self._taken = self._taken, None
        assert taken is not None
        if is_whole:
            taken = taken._replace(failed=taken[:3])
        self._left.appendleft(taken)
