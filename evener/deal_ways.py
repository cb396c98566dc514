"""Ways to deal a batch, sorted by length, to ranks of unequal speed.

The sorted batch is cut into runs of like length, wherever a further pass costs less than the padding that it saves. The
first runs go to the ranks as blocks, which takes few passes; the rows of the others go one by one to the rank that
would be done first, so that all ranks finish at nearly the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from evener.costs import RankCost

_CUTS = 64  # places where a batch may be cut
_BISECTIONS = 12
_PRICES = (1, 2, 4)  # of a further pass, in its fixed seconds: several ranks may open one for the same run
_BLOCK_PARTS = (0.8, 0.0, 1.0, 0.5)  # of the batch that is dealt in blocks


class Hands:
    """What each rank holds so far: passes as rows of the sorted batch, and the seconds that they take together."""

    def __init__(self, ranks: int) -> None:
        self.passes: list[list[Sequence[int]]] = [[] for _ in range(ranks)]
        self.finish = [0.0] * ranks


class DealWays:
    """Ways to deal rows of these `lengths`, longest first; without `saves_padding`, in as few passes as can be."""

    def __init__(self, lengths: Sequence[int], ranks: Sequence[RankCost], saves_padding: bool) -> None:
        self._lengths = lengths
        self._ranks = ranks
        self._fixed = [each.cost.fixed_s for each in ranks]
        self._seconds = [[each.cost.row_seconds(length) for length in lengths] for each in ranks]
        self._by_speed = sorted(range(len(ranks)), key=lambda rank: self._seconds[rank][0])
        self._saves_padding = saves_padding
        self._places = [0, *_find_places(lengths), len(lengths)]

    def least_seconds(self) -> float:
        """A bound that no way can beat, if the ranks differ in speed only and a batch has few lengths; else nearly so.

        The larger of (the least cost of the batch / the sum of speeds) and (the longest row on the fastest rank). The
        least cost is that of the best cuts on one device: any way to deal is also a way to cut.
        """
        starts = [0, *self._cut(1)]
        alone = [
            sum(fixed + (stop - start) * seconds[start] for start, stop in pairwise(starts))
            for fixed, seconds in zip(self._fixed, self._seconds, strict=True)
        ]
        longest = min(fixed + seconds[0] for fixed, seconds in zip(self._fixed, self._seconds, strict=True))
        return max(longest, 1 / sum(1 / each for each in alone))

    def try_all(self) -> Iterator[Hands]:
        """One way after the other, the better ones first as a rule; there is at least one."""
        tried = set()
        prices = [price for price in _PRICES if price <= max(2, len(self._ranks) // 2)]
        for price in prices if self._saves_padding else (math.inf,):
            stops = self._cut(price)
            for part in _BLOCK_PARTS:
                rows = min((0, *stops), key=lambda stop: abs(stop - part * len(self._lengths)))
                if (rows, *stops) not in tried:
                    tried.add((rows, *stops))
                    hands = self._deal_blocks(rows, stops)
                    if hands is not None:
                        self._deal_singly(hands, rows, stops)
                        yield hands

    def _cut(self, price: float) -> list[int]:
        """Where runs end, so that they cost one device the least if a pass takes `price` times its fixed seconds."""
        places = self._places
        if price == math.inf:
            return places[-1:]
        fast = self._by_speed[0]
        fixed, seconds = self._fixed[fast] * price, [self._seconds[fast][place] for place in places[:-1]]
        least, before = [0.0], [0]
        for stop in places[1:]:
            costs = [cost + (stop - start) * each for cost, start, each in zip(least, places, seconds, strict=False)]
            least.append(min(costs) + fixed)
            before.append(costs.index(min(costs)))
        stops, place = [], len(places) - 1
        while place:
            stops.append(places[place])
            place = before[place]
        return stops[::-1]

    def _deal_blocks(self, rows: int, stops: Sequence[int]) -> Hands | None:
        """The first rows as one block for each rank, ending as early as can be; None where a row doesn't fit."""
        best = self._lay_blocks(rows, stops, math.inf)
        low, high = 0.0, max(best.finish) if best else 0.0
        for _ in range(_BISECTIONS if best and rows else 0):
            middle = (low + high) / 2
            hands = self._lay_blocks(rows, stops, middle)
            if hands is None:
                low = middle
            else:
                best, high = hands, middle
        return best

    def _lay_blocks(self, rows: int, stops: Sequence[int], limit: float) -> Hands | None:
        """One block after the other, each as large as it can be by `limit` seconds; None if rows are left."""
        hands, row, run = Hands(len(self._ranks)), 0, 0
        for rank in self._by_speed:
            while row < rows:
                each = self._seconds[rank][row]
                left = limit - hands.finish[rank] - self._fixed[rank]
                space = min(stops[run] - row, self._ranks[rank].most_rows(self._lengths[row]))
                fit = int(space if each * space <= left else left // each) if left >= 0 else 0
                if not fit:
                    break
                stop = row + fit
                hands.passes[rank].append(range(row, stop))
                hands.finish[rank] += self._fixed[rank] + (stop - row) * each
                row = stop
                run += row == stops[run]
                if fit < space:
                    break
        return hands if row == rows else None

    def _deal_singly(self, hands: Hands, row: int, stops: Sequence[int]) -> None:
        """The rows from `row` on, each to the rank that would be done first."""
        for stop in stops:
            if row < stop:
                self._deal_run(hands, row, stop)
                row = stop

    def _deal_run(self, hands: Hands, start: int, stop: int) -> None:
        """The rows of one run; each rank's first one begins a pass."""
        finish, passes, fixed, seconds = hands.finish, hands.passes, self._fixed, self._seconds
        opened: list[list[int]] = [[] for _ in finish]
        space: list[float] = [0] * len(finish)  # rows that the open pass may still take
        each = [own[start] for own in seconds]
        done = [self._opened(rank, start, finish[rank]) for rank in range(len(finish))]  # with one more row
        for row in range(start, stop):
            rank = done.index(min(done))
            if space[rank]:
                finish[rank] += each[rank]
                opened[rank].append(row)
            else:
                each[rank] = seconds[rank][row]
                finish[rank] += fixed[rank] + each[rank]
                opened[rank] = [row]
                passes[rank].append(opened[rank])
                space[rank] = self._ranks[rank].most_rows(self._lengths[row])
            space[rank] -= 1
            done[rank] = finish[rank] + each[rank] if space[rank] else self._opened(rank, row, finish[rank])

    def _opened(self, rank: int, row: int, finish: float) -> float:
        """When a pass ends that the rank begins with the row; infinite if it can't hold it."""
        fits = self._ranks[rank].most_rows(self._lengths[row]) >= 1
        return finish + self._fixed[rank] + self._seconds[rank][row] if fits else math.inf


def _find_places(lengths: Sequence[int]) -> list[int]:
    """Where a batch may be cut: wherever the length changes, of too many places where it changes in proportion."""
    changes = [row for row in range(1, len(lengths)) if lengths[row] != lengths[row - 1]]
    if len(changes) <= _CUTS:
        return changes
    step = math.log((lengths[0] + 1) / (lengths[-1] + 1)) / _CUTS
    classes = [int(math.log(length + 1) / step) for length in lengths]
    return [row for row in changes if classes[row] != classes[row - 1]]
