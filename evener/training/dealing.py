"""The dealing of a global batch's rows of unequal length: which rank computes which, and in which passes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..errors import RequestError
from ..plan.layout import Share
from ..shares.costs import Cost, RankCost
from ..shares.passes import split_passes
from ..shares.whole_rows import apportion, bounds
from .deal_ways import DealWays

CLOSE_ENOUGH = 0.005  # over the lower bound, and this for each rank: no further way to deal is tried
CLOSE_PER_RANK = 0.0025

Passes = tuple[tuple[tuple[int, ...], ...], ...]  # of each rank, the places in the batch of each pass's rows


class Deal(msgspec.Struct, frozen=True):
    """The passes of each rank; their seconds by the costs, and their tokens without and with padding, rank by rank."""

    passes: Passes
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each rank."""
        return tuple(sum(map(len, own)) for own in self.passes)

    @property
    def in_passes(self) -> bool:
        """True if a rank takes more than one pass."""
        return any(len(own) > 1 for own in self.passes)


class Dealer(msgspec.Struct, frozen=True):
    """Deals the rows of global batches to ranks; the same on every rank, as it depends on the lengths only."""

    ranks: tuple[RankCost, ...]
    ratios: tuple[float, ...]  # of rows to ranks where all rows are equally long
    saves_padding: bool = True  # in further passes; else there are only those that limits ask for

    def deal(self, lengths: Sequence[int]) -> Deal:
        """Deal rows of these `lengths` for equal predicted finish times, each rank a row if there are enough.

        Rows that are all equally long are dealt in their order, by the ratios, as they are without lengths. A pass
        costs its rows times its longest, so the others are sorted, and a rank's pass has rows of like length.
        """
        if min(lengths) == max(lengths):
            return self._make(self._deal_equal(len(lengths), lengths[0]), lengths)
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        ways = DealWays([lengths[row] for row in order], self.ranks, self.saves_padding)
        enough = (1 + CLOSE_ENOUGH + CLOSE_PER_RANK * len(self.ranks)) * ways.least_seconds()
        best = next(found := ways.try_all())
        while max(best.finish) > enough and (hands := next(found, None)):
            best = min(best, hands, key=lambda each: max(each.finish))
        passes = [[list(each) for each in own] for own in best.passes]
        _give_each_a_row(passes)
        dealt = (tuple(tuple(sorted(map(order.__getitem__, each))) for each in own) for own in passes)
        return self._make(tuple(dealt), lengths)

    def check(self, lengths: Sequence[int], rows: int) -> None:
        """RequestError unless there is a length for each of the data's `rows`, and a rank that can hold each row."""
        if len(lengths) != rows:
            raise RequestError(
                f"There are {len(lengths)} lengths for {rows} rows of data.", "Give one for each row, in their order."
            )
        shortest, longest = min(lengths), max(lengths)
        if shortest < 0:
            raise RequestError(
                f"Row {lengths.index(shortest)} has length {shortest}.", "A length is tokens, 0 or more."
            )
        if not any(rank.most_rows(longest) for rank in self.ranks):
            raise RequestError(
                f"Row {lengths.index(longest)} has {longest} tokens, and no device of the plan holds more than"
                f" {max(rank.tokens for rank in self.ranks)} in a pass.",
                "Cut such rows or leave them out, or make a plan on a device with more memory.",
            )

    def _deal_equal(self, rows: int, length: int) -> Passes:
        dealt = []
        for rank, (first, last) in zip(self.ranks, bounds(apportion(rows, self.ratios)), strict=True):
            sizes = split_passes(last - first, max(1, int(min(rank.most_rows(length), last - first))))
            dealt.append(tuple(tuple(range(first + start, first + stop)) for start, stop in bounds(sizes)))
        return tuple(dealt)

    def _make(self, passes: Passes, lengths: Sequence[int]) -> Deal:
        cut = [[(len(each), max(map(lengths.__getitem__, each))) for each in own] for own in passes]
        seconds = (sum(rank.cost.seconds(*each) for each in own) for rank, own in zip(self.ranks, cut, strict=True))
        tokens = (sum(sum(map(lengths.__getitem__, each)) for each in own) for own in passes)
        padded = (sum(rows * length for rows, length in own) for own in cut)
        return Deal(passes, tuple(seconds), tuple(tokens), tuple(padded))


def make_dealer(batches: Sequence[int], micros: Sequence[int], shares: Sequence[Share]) -> Dealer:
    """A dealer by the costs of a plan's shares, or by its rows: `batches` of each rank, in passes of up to `micros`.

    Without costs, a token takes a rank as long as its rows of a full batch say, whatever the row's length, and a rank
    takes no more passes than it has to, as nothing says what one costs.
    """
    ratios = tuple(map(float, batches))
    costs = [share.cost for share in shares if share.cost is not None]
    if costs:
        tokens = (share.tokens for share in shares)
        return Dealer(tuple(map(RankCost, costs, tokens)), ratios)
    ranks = (
        RankCost(Cost(0.0, 1.0 / batch, 0.0), rows=micro if micro < batch else 0)
        for batch, micro in zip(batches, micros, strict=True)
    )
    return Dealer(tuple(ranks), ratios, saves_padding=False)


def _give_each_a_row(passes: list[list[list[int]]]) -> None:
    """Move the shortest row of a rank that has several to one that has none."""
    for own in passes:
        givers = [each for each in passes if sum(map(len, each)) > 1]
        if not own and givers:
            giver = max(givers, key=lambda each: max(map(max, each)))
            last = max(giver, key=max)
            own.append([last.pop()])
            giver[:] = filter(None, giver)
