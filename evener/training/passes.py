"""The passes of a rank's batch: their rows, their weights, and retries when memory runs out.

A pass is one forward and backward pass (a micro-batch). A rank whose rows don't fit in memory
at once computes them in several passes. The sum of the passes' gradients, each times its
weight, is the gradient of the rank's mean loss. A pass that runs out of memory is retried in
smaller passes with the same rows:

    sizes = divide_rows(rows, most)            # `most` is from the plan
    queue = PassQueue(sizes, limit)
    while (turn := queue.take()) is not None:
        ...                                    # compute turn.rows rows of pass turn.number
        queue.complete()                       # or limit.halve(turn.rows) and queue.retry()

The rules are the same for every trainer and framework: the user's own training loops
(`evener/torch/step`), transformers' Trainer, Lightning and Keras. Each of their adapters undoes the
failed attempt itself before the retry. This module has no side effects.
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


def divide_rows(rows: int, most: int, passes: int = 0) -> tuple[int, ...]:
    """Return the rows of each pass, in as few passes as possible.

    A pass has up to `most` rows. If `passes` isn't 0, there are exactly that many passes, perhaps
    some without rows.
    """
    # a rank without rows has one pass, in which it only takes part in collectives
    if passes:
        return even(rows, passes)
    return split_passes(rows, most) or (0,)


def count_smaller_passes(rows: int, most: int, least: int = 1) -> int:
    """Return how many passes `rows` rows need if `most` fit in memory at once.

    The result is at least 1. Each pass has at least `least` rows, even if that is more than `most`.
    """
    return max(1, min(count_passes(rows, most), rows // least))


def count_equal_passes(rows: Sequence[int], most: Sequence[int]) -> int:
    """Return how many passes every rank runs if each pass has collectives.

    `rows` are the ranks' rows, and `most` their maximum rows per pass.
    """
    return max(1, *map(count_passes, rows, most))


def weigh_passes(sizes: Sequence[int], total: int | None = None) -> tuple[float, ...]:
    """Return the weight of each pass's mean loss in the total mean loss.

    `sizes` are the passes' rows. `total` is by default their sum; if it is 0, all weights are 1.
    """
    # the total mean loss is the mean over `total` rows
    rows = sum(sizes) if total is None else total
    return tuple(own / rows if rows else 1.0 for own in sizes)


class Pass(NamedTuple):
    """A pass of the plan, or a piece of one that ran out of memory."""

    number: int  # index of the plan's pass in the batch, from 0
    start: int  # first row within that pass
    rows: int  # rows that count; 0 if the rank only takes part in collectives
    planned: int  # rows of the plan's pass
    ends: bool  # this is the last piece of the plan's pass
    last: bool  # this is the last pass of the batch

    @property
    def stop(self) -> int:
        """The index after this pass's last row, counted from the start of the plan's pass."""
        return self.start + self.rows

    @property
    def part(self) -> float:
        """The fraction of the planned pass's rows in this pass; below 1 for a piece.

        It is also the weight of this pass's mean loss in the mean loss of the planned pass.
        """
        return self.rows / self.planned if self.planned else 1.0


class PassLimit:
    """The current maximum rows per pass of a rank.

    The limit is halved after a pass runs out of memory. It is doubled again after CLEAN_STEPS steps
    in which no pass runs out of memory.
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
        """The current maximum rows per pass; None if the plan's passes needn't be cut.

        It is the smaller of two limits: the one set after memory ran out, and the one predicted
        from measured memory.
        """
        known = [each for each in (self.most, self.predicted) if each is not None]
        return min(known, default=None)

    def begin_batch(self, others_bytes: Callable[[], int] = int) -> None:
        """Begin a batch; after 200 steps without a failed pass, double the limit.

        `others_bytes` returns the device memory that other processes hold; 0 if unknown.
        """
        # If other processes held 1 GiB or more when a pass ran out of memory, `others_bytes` is
        # called again in every tenth step. Once they hold less than half as much, the limit is
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

    def count(self, rows: int, most: int, least: int = 1) -> int:
        """Return the number of passes that `rows` rows need under the current limit.

        `most` is the plan's maximum rows per pass, and `least` the minimum rows per pass.
        """
        held = most if self.most is None else min(most, self.most)
        return count_smaller_passes(rows, held, least)

    def complete(self) -> None:
        """Reset the count of consecutive failures when a pass has succeeded."""
        self._failures = 0

    def count_failure(self, rows: int, least: int, held: str) -> None:
        """Count a failed pass if it can't be halved.

        It can't if half of its `rows` are fewer than `least`. Raises DeviceError after 20 such
        passes in a row. The message contains `held`, which says what used the memory.
        """
        if rows < 2 * least:
            self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise DeviceError(
                f"Rank {self._rank} ran out of memory {self._failures} times in a row with a "
                f"pass of {rows} rows that can't be smaller: {held}.",
                (
                    "Take a smaller model, shorter rows or activation checkpointing, or leave the "
                    "device out of the plan."
                ),
            )

    def halve(self, rows: int, least: int, others_bytes: int = 0) -> int:
        """Halve the limit after a pass of `rows` rows ran out of memory.

        Return the new limit, which is never below `least`. `others_bytes` is the device memory that
        other processes hold now.
        """
        # if others hold 1 GiB or more, `begin_batch` later checks whether they have freed memory
        self.most = max(least, rows // 2)
        self._clean_steps = 0
        self._others_bytes = others_bytes
        return self.most


class _Range(NamedTuple):
    """Rows of a planned pass that are still to be computed."""

    number: int
    start: int
    stop: int
    # The range of the failed pass that contains these rows, if it had sent some of its sums.
    failed: tuple[int, int, int] | None = None


class PassQueue:
    """Yields the passes of one batch, and cuts passes larger than `limit`.

    `sizes` are the rows of the planned passes, which are in order. Call either `complete` or
    `retry` after each pass that `take` returns.
    """

    def __init__(self, sizes: Sequence[int], limit: PassLimit) -> None:
        self._sizes = tuple(sizes)
        self._limit = limit
        self._left = deque(_Range(number, 0, size) for number, size in enumerate(sizes))
        self._taken: _Range | None = None

    def take(self, least: Callable[[], int] = lambda: 1) -> Pass | None:
        """Return the next pass; None after the last one.

        A pass with more rows than the limit is cut into pieces of at least `least()` rows, and the
        first piece is returned.
        """
        if not self._left:
            return None
        most = self._limit.lowest
        if most is not None:
            self._cut_first(most, least)
        taken = self._taken = self._left.popleft()
        ends = not self._left or self._left[0].number != taken.number
        rows = taken.stop - taken.start
        planned = self._sizes[taken.number]
        return Pass(taken.number, taken.start, rows, planned, ends, not self._left)

    def _cut_first(self, most: int, least: Callable[[], int]) -> None:
        """Cut the first range into pieces of at most `most` rows."""
        # A piece has at least `least()` rows, even if that is more.
        first = self._left[0]
        rows = first.stop - first.start
        if rows <= most:
            return
        self._left.popleft()
        pieces = bounds(even(rows, count_smaller_passes(rows, most, least())))
        for start, stop in reversed(pieces):
            cut = first._replace(start=first.start + start, stop=first.start + stop)
            self._left.appendleft(cut)

    def complete(self) -> bool:
        """Mark the pass that `take` returned last as computed.

        Return False if other pieces of the same failed pass are still to be computed.
        """
        taken, self._taken = self._taken, None
        assert taken is not None
        if taken.failed is not None and self._left and self._left[0].failed == taken.failed:
            return False
        self._limit.complete()
        return True

    def retry(self, is_whole: bool = True) -> None:
        """Put the failed pass back at the front of the queue.

        `is_whole` is False for a piece of a pass that failed earlier.
        """
        # The failed pass is the one that `take` returned last. `complete` then returns False until
        # all rows of the failed pass are computed or, for a piece, all rows of the earlier pass.
        taken, self._taken = self._taken, None
        assert taken is not None
        if is_whole:
            taken = taken._replace(failed=taken[:3])
        self._left.appendleft(taken)
