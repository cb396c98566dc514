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
failed attempt itself before the retry.
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
    """Return the rows of each pass, with at most `most` rows in each.

    With `passes` above 0, the rows are divided into that many passes instead. Returns (0,) for no
    rows.
    """
    # a rank without rows has one pass, in which it only takes part in collectives
    if passes:
        return even(rows, passes)
    return split_passes(rows, most) or (0,)


def count_smaller_passes(rows: int, most: int, least: int = 1) -> int:
    """Return the number of passes with at most `most` rows and at least `least` rows each.

    If that isn't possible, passes have more than `most` rows.
    """
    return max(1, min(count_passes(rows, most), rows // least))


def count_equal_passes(rows: Sequence[int], most: Sequence[int]) -> int:
    """Return how many passes every rank must compute so that no rank exceeds its rows per pass.

    `rows` are the ranks' rows, and `most` their limits per pass.
    """
    return max(1, *map(count_passes, rows, most))


def weigh_passes(sizes: Sequence[int], total: int | None = None) -> tuple[float, ...]:
    """Return each pass's weight in the batch's mean loss; 1 for a batch without rows.

    `total` is the number of rows in the batch, by default the sum of `sizes`.
    """
    # the total mean loss is the mean over `total` rows
    rows = sum(sizes) if total is None else total
    return tuple(own / rows if rows else 1.0 for own in sizes)


class Pass(NamedTuple):
    """A forward and backward pass over some rows of a batch.

    After memory ran out, a pass of the plan is computed in several smaller pieces; this is one
    piece.
    """

    number: int  # index of the plan's pass in the batch, from 0
    start: int  # first row within that pass
    rows: int  # rows that count; 0 if the rank only takes part in collectives
    planned: int  # rows of the plan's pass
    ends: bool  # this is the last piece of the plan's pass
    last: bool  # this is the last pass of the batch

    @property
    def stop(self) -> int:
        """Index after its last row, counted from the first row of the plan's pass."""
        return self.start + self.rows

    @property
    def part(self) -> float:
        """Its rows as a fraction of the rows in the plan's pass."""
        return self.rows / self.planned if self.planned else 1.0


class PassLimit:
    """Maximum rows per pass on a rank, lowered when memory runs out and raised again later.

    It is halved when memory runs out, and doubled after 200 steps without that.
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
        """Maximum rows per pass; None without a limit.

        It follows from passes that ran out of memory, and from predicted memory use.
        """
        known = [each for each in (self.most, self.predicted) if each is not None]
        return min(known, default=None)

    def begin_batch(self, others_bytes: Callable[[], int] = int) -> None:
        """Start a batch; raise the limit after enough batches without a lack of memory.

        `others_bytes` returns the device memory that other processes hold, in bytes. The limit is
        removed if they have released most of it.
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
        """Return into how many passes to divide `rows` rows.

        A pass has at most `most` rows, and at most as many as this limit allows, but at least
        `least` rows.
        """
        held = most if self.most is None else min(most, self.most)
        return count_smaller_passes(rows, held, least)

    def complete(self) -> None:
        """Record that a pass didn't run out of memory."""
        self._failures = 0

    def count_failure(self, rows: int, least: int, held: str) -> None:
        """Count a pass of `rows` rows that ran out of memory.

        `least` is the fewest rows that a pass can have, and `held` text for the error message on
        what uses the memory. Raises DeviceError after 20 failures in a row of passes too small to
        divide.
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
        """Halve the rows of a pass that ran out of memory, and return the new limit.

        `rows` are the rows of that pass; the limit isn't below `least`. `others_bytes` is the
        device memory that other processes hold, in bytes.
        """
        # if others hold 1 GiB or more, `begin_batch` later checks whether they have freed memory
        self.most = max(least, rows // 2)
        self._clean_steps = 0
        self._others_bytes = others_bytes
        return self.most


class _Range(NamedTuple):
    """A range of rows of one pass of the plan, still to be computed."""

    number: int
    start: int
    stop: int
    # The range of the failed pass that contains these rows, if it had sent some of its sums.
    failed: tuple[int, int, int] | None = None


class PassQueue:
    """The passes of one batch that a rank still has to compute.

    `sizes` are the rows of the plan's passes; `limit` may divide them further. Call either
    `complete` or `retry` after each pass that `take` returns.
    """

    def __init__(self, sizes: Sequence[int], limit: PassLimit) -> None:
        self._sizes = tuple(sizes)
        self._limit = limit
        self._left = deque(_Range(number, 0, size) for number, size in enumerate(sizes))
        self._taken: _Range | None = None

    def take(self, least: Callable[[], int] = lambda: 1) -> Pass | None:
        """Return the next pass, or None after the last.

        A pass above the limit is divided into pieces; `least` returns the fewest rows of a piece.
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
        """Divide the next pass into pieces of at most `most` rows.

        Each piece has at least `least()` rows.
        """
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
        """Record that the pass returned by `take` succeeded.

        Returns False if it is a piece of a pass that ran out of memory, and other pieces are
        missing.
        """
        taken, self._taken = self._taken, None
        assert taken is not None
        if taken.failed is not None and self._left and self._left[0].failed == taken.failed:
            return False
        self._limit.complete()
        return True

    def retry(self, is_whole: bool = True) -> None:
        """Put the pass returned by `take` back into the queue, because it ran out of memory.

        `is_whole` is False for a piece of a pass that had failed before.
        """
        # The failed pass is the one that `take` returned last. `complete` then returns False until
        # all rows of the failed pass are computed or, for a piece, all rows of the earlier pass.
        taken, self._taken = self._taken, None
        assert taken is not None
        if is_whole:
            taken = taken._replace(failed=taken[:3])
        self._left.appendleft(taken)
