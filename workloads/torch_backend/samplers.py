"""The rows that a probe trains on; where they have lengths, the work of each pass is kept."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Self

import torch

from evener.errors import RequestError
from evener.shares.costs import Cost, RankCost, Work
from evener.shares.whole_rows import bounds
from evener.torch_rows.sampler import LengthSampler, UnevenBatchSampler
from evener.training.dealing import Dealer

SAMPLED = 256  # lengths that stand for those of all rows
ENDLESS_STEPS = 1 << 40


class EndlessSampler(UnevenBatchSampler):
    """Endless steps, each on the next rows of one order that repeats."""

    def __init__(self, rows: int, sizes: Sequence[int], rank: int) -> None:
        super().__init__(ENDLESS_STEPS * sum(sizes), sizes, rank)
        self._rows = rows

    def batches(self) -> Iterator[torch.Tensor]:
        """This rank's part of each step; it may hold a row twice if a batch is larger than the pool."""
        once = torch.randperm(self._rows, generator=torch.Generator().manual_seed(self.seed))
        order = once.repeat(2 + self.global_batch // self._rows)
        start, stop = bounds(self.shares)[self.rank]
        firsts = (step * self.global_batch % self._rows for step in range(len(self)))
        return (order[first + start : first + stop] for first in firsts)


class Lengths:
    """The tokens of all rows of a data set, which aren't all equal; RequestError if there isn't one for each row."""

    def __init__(self, tokens: Sequence[int], rows: int) -> None:
        Dealer((RankCost(Cost(0.0, 1.0, 0.0)),), (1.0,)).check(tokens, rows)
        self.tokens = torch.as_tensor(tokens)
        self._rising = torch.argsort(self.tokens, stable=True)

    @property
    def longest_row(self) -> int:
        """The number of the last of the longest rows."""
        return int(self._rising[-1])

    def sample(self) -> tuple[int, ...]:
        """An even sample, rising, the longest among it."""
        rising, rows = self.tokens[self._rising].tolist(), len(self.tokens)
        places = [rows * n // SAMPLED for n in range(SAMPLED - 1)] if rows > SAMPLED else range(rows - 1)
        return (*(rising[place] for place in places), rising[-1])

    def nearest(self, length: int, rows: int) -> torch.Tensor:
        """Row numbers (rows,): the longest of at most `length` tokens, and those just below; some twice if need be."""
        stop = max(1, bisect_right(self.tokens[self._rising].tolist(), length))
        below = self._rising[:stop].flip(0)
        return below.repeat(-(-rows // stop))[:rows]

    def count(self, rows: torch.Tensor) -> Work:
        """The work of a pass over these rows."""
        own = self.tokens[rows]
        longest = int(own.max())
        padded = len(rows) * longest
        return Work(float(own.sum()), 1.0, padded, padded * longest)


class _Counted(UnevenBatchSampler):
    """A sampler that keeps the work of each of its batches, in the order in which they are drawn."""

    def count_by(self, lengths: Lengths) -> Self:
        """Count with these lengths; returns itself."""
        self._all_lengths = lengths
        self.works: deque[Work] = deque()
        return self

    def batches(self) -> Iterator[torch.Tensor]:
        """The sampler's batches, each with its work counted."""
        for rows in super().batches():
            self.works.append(self._all_lengths.count(rows))
            yield rows


class CountedSampler(_Counted):
    """Rows in the order of the data, with the work of each pass."""


class CountedEndlessSampler(_Counted, EndlessSampler):
    """Endless steps on data that have fewer rows than a batch, with the work of each pass."""


class CountedLengthSampler(_Counted, LengthSampler):
    """Rows of global batches, dealt by their cost, with the work of each pass."""


class _RepeatingSampler(UnevenBatchSampler):
    """Endless steps on the same rows, which all ranks have."""

    def __init__(self, rows: torch.Tensor, sizes: Sequence[int], rank: int) -> None:
        super().__init__(ENDLESS_STEPS * sum(sizes), sizes, rank)
        self._rows = rows

    def batches(self) -> Iterator[torch.Tensor]:
        """The rows, step after step."""
        return repeat(self._rows, len(self))


class OneLengthSampler(_Counted, _RepeatingSampler):
    """Endless steps on the same rows of one length, with the work of each pass."""


def read_lengths(given: Any, rows: int) -> Lengths | None:
    """The lengths of rows that a user gave; None for none, and where all are equal. RequestError for anything else."""
    if given is None:
        return None
    try:
        tokens = [int(each) for each in given]
    except (TypeError, ValueError):
        raise RequestError(
            f"The lengths of the training data are of type {type(given).__name__}.", "Give a whole number for each row."
        ) from None
    lengths = Lengths(tokens, rows)
    return None if min(tokens) == max(tokens) else lengths
