"""The rows that each rank computes if rows are of unequal length: global batches stay, and are divided by cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NoReturn
from zlib import crc32

import torch

from ..errors import RequestError
from ..training.dealing import Deal, Dealer
from .dealt_batch import DealtBatch
from .sampler import UnevenBatchSampler

_KEPT = 128  # batches whose dealing is kept: those that are fetched ahead, and the current one


class LengthSampler(UnevenBatchSampler):
    """A batch of row numbers for each pass of one rank; `lengths` are the tokens of all rows of the data.

    Global batches and their order are those without lengths, so a state can be loaded under other shares. cuDNN's
    attention is turned off in this process: it makes a plan for each new shape, about 100 ms a pass on an H200, and
    nearly every pass has one. RequestError for lengths that aren't the data's, and for a row that no rank can hold.
    """

    is_dealt = True

    def __init__(
        self, rows: int, shares: Sequence[int], rank: int, *, lengths: Any, dealer: Dealer, **options: Any
    ) -> None:
        super().__init__(rows, shares, rank, **options)
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._lengths = _whole_numbers(lengths)
        self._dealer = dealer
        tokens = self._lengths.tolist()
        dealer.check(tokens, rows)
        longest = sorted(tokens)[-self.global_batch :]
        # else a loop without parts would train until the first batch comes that has passes
        self._in_passes = (dealer.saves_padding and min(tokens) < max(tokens)) or dealer.deal(longest).in_passes
        self._orders: dict[int, torch.Tensor] = {}  # of rows, by epoch
        self._deals: dict[tuple[int, int], Deal] = {}  # by epoch and place

    def deal_at(self, first: int, epoch: int) -> Deal:
        """The deal of the global batch that begins with the epoch's row `first`."""
        found = self._deals.get((epoch, first))
        if found is None:
            rows = self._draw(epoch)[first : first + sum(super().sizes_at(first))]
            found = self._deals[epoch, first] = self._dealer.deal(self._lengths[rows].tolist())
            for old in list(self._deals)[:-_KEPT]:
                self._deals.pop(old, None)
        return found

    def sizes_at(self, first: int, epoch: int | None = None, schedule: Any = None) -> tuple[int, ...]:
        """The rows of each rank in the batch that begins with row `first`; 0 for a rank that only keeps step."""
        return self.deal_at(first, self.epoch if epoch is None else epoch).sizes

    def pass_sizes(self, first: int, epoch: int) -> tuple[int, ...]:
        """The rows that count in each of this rank's passes of the batch that begins with row `first`."""
        return tuple(map(len, self.deal_at(first, epoch).passes[self.rank])) or (0,)

    def count_tokens(self, first: int, epoch: int) -> tuple[int, int]:
        """The tokens of this rank's rows in the batch that begins with row `first`, without and with padding."""
        deal = self.deal_at(first, epoch)
        return deal.tokens[self.rank], deal.padded[self.rank]

    def batches(self) -> Iterator[torch.Tensor]:
        """The rows of each pass, from the current epoch and position."""
        return chain.from_iterable(self.steps())

    def steps(self) -> Iterator[list[torch.Tensor]]:
        """The rows of each batch, as a list of its passes, from the current epoch and position."""
        return (self._passes(first, epoch) for epoch in (self.epoch,) for first in self._firsts())

    def _firsts(self) -> range:
        """The first rows of the batches that are left of this epoch."""
        return range(self.position, self.length, self.global_batch)[: self.steps_left]

    def _passes(self, first: int, epoch: int) -> list[torch.Tensor]:
        rows = self._draw(epoch)[first : first + self.global_batch]
        passes = self.deal_at(first, epoch).passes[self.rank]
        if not passes:  # the shortest row, to keep step with
            return [rows[self._lengths[rows].argmin()].reshape(1)]
        return [rows[torch.tensor(places)] for places in passes]

    def join_passes(self, fetched: Iterator[Any]) -> Iterator[Any]:
        """The batch of each step: a DealtBatch, or one pass as it is where no batch has more on any rank."""
        return self._join(fetched, self.epoch, self._firsts())

    def _join(self, fetched: Iterator[Any], epoch: int, firsts: range) -> Iterator[Any]:
        for first in firsts:
            rows = self.pass_sizes(first, epoch)
            passes = list(islice(fetched, len(rows)))
            yield DealtBatch(passes, rows) if self._in_passes else passes[0]

    def digest(self, epoch: int) -> int:
        """A digest of the lengths, and of the user's own order of an epoch if there is one."""
        return crc32(self._lengths.numpy().tobytes(), super().digest(epoch) or 0)

    def rows_of_odd_tail(self) -> object:
        """An object equal to no other, as every batch weighs the ranks differently."""
        return object()

    def _draw(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            self._orders = {epoch: super()._draw(epoch), **dict(list(self._orders.items())[:1])}
        return self._orders[epoch]


def make_sampler(
    rows: int, shares: Sequence[int], rank: int, dealing: tuple[Any, Dealer] | None, *, join_tail: bool, **options: Any
) -> UnevenBatchSampler:
    """The sampler of a rank: by the lengths of rows if `dealing` has these and a dealer, otherwise by their number."""
    if dealing is None:
        return UnevenBatchSampler(rows, shares, rank, join_tail=join_tail, **options)
    return LengthSampler(rows, shares, rank, lengths=dealing[0], dealer=dealing[1], **options)


def raise_no_shares() -> NoReturn:
    """RequestError: rows are dealt by length."""
    raise RequestError("Rows dealt by length have no shares to rebalance.", "Leave rebalance out, or make a new plan.")


def check_dealt(training: bool, strategy: Any, rebalancing: Any) -> None:
    """RequestError where rows can't be dealt by length."""
    if not training:
        raise RequestError(
            "Rows of a validation aren't dealt by length, as its batches have one pass on each rank.",
            "Leave lengths out.",
        )
    if rebalancing is not None:
        raise_no_shares()
    if strategy is not None:
        raise RequestError(
            "Lightning takes as many passes on every rank and in every step, and rows dealt by length don't.",
            "Leave lengths out, or write the loop with split.parts.",
        )


def _whole_numbers(lengths: Any) -> torch.Tensor:
    try:
        found = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0, 0)
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise RequestError(
            f"lengths={type(lengths).__name__} isn't a list of whole numbers.", "Give the tokens of each row, in order."
        )
    return found.to("cpu", torch.int64)
