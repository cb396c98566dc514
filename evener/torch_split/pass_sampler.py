"""A rank's rows of each global batch, cut into the passes that gradient accumulation takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ..shares.whole_rows import even
from .sampler import UnevenBatchSampler


class PassSampler:
    """A batch sampler with `passes` batches for each global batch, however short the last one is.

    A pass without a row of its own gets one that doesn't count: all ranks then take the passes that they always take.
    """

    def __init__(self, sampler: UnevenBatchSampler, passes: int) -> None:
        self.sampler, self.passes = sampler, passes
        self.batch_size = -(-sampler.shares[sampler.rank] // passes)
        self.drop_last = sampler.drop_last
        self.first_pass = 0  # of the next iteration: those before it are left out

    def __len__(self) -> int:
        """Passes of an epoch."""
        return len(self.sampler) * self.passes

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self._passes(), self.first_pass, None)

    def _passes(self) -> Iterator[list[int]]:
        for step, rows in enumerate(self.sampler):
            first = 0
            for size in self.pass_sizes(step):
                yield rows[first : first + size] or rows[:1]
                first += size

    def set_epoch(self, epoch: int) -> None:
        """The order of rows of this epoch, from its first row on."""
        self.sampler.set_epoch(epoch)

    def pass_sizes(self, step: int) -> tuple[int, ...]:
        """The rows that count of each pass in the epoch's global batch number `step`."""
        return even(self.rank_sizes(step)[self.sampler.rank], self.passes)

    def global_rows(self, step: int) -> int:
        """The rows of that global batch, over all ranks."""
        return sum(self.rank_sizes(step))

    def count_tokens(self, steps: Iterable[int]) -> tuple[int, int]:
        """The tokens of this rank's rows in those batches, without and with padding; 0 where rows have no lengths."""
        rows = self.sampler
        counted = [rows.count_tokens(step * rows.global_batch, rows.epoch) for step in steps]
        return sum(tokens for tokens, _ in counted), sum(padded for _, padded in counted)

    def rank_sizes(self, step: int) -> tuple[int, ...]:
        """The rows of each rank in that global batch."""
        return self.sampler.sizes_at(step * self.sampler.global_batch)
