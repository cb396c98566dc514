"""Ways to deal a batch, sorted by length, to ranks of unequal speed.

The sorted batch is cut into runs of like length, wherever a further pass costs less than the padding that it saves. The
first runs go to the ranks as blocks, which takes few passes; the rows of the others go one by one to the rank that
would be done first, so that all ranks finish at nearly the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..shares.costs import RankCost

_NEXT_PLACE = 0.97  # of the length at one place where a batch may be cut: the next one is no longer
_LIMITS = 7  # seconds in which blocks are tried to end; the first exceeds the bound by this part:
_MARGIN = 0.04
_DEARER = (2, 4)  # prices of a further pass, in its fixed seconds: several ranks may open one for the same run
_BLOCK_PARTS = (0.8, 1.0, 0.5, 0.0)  # of the batch that is dealt in blocks


class Hands:
    """The passes of each rank so far, as rows of the sorted batch, and the seconds that they take together."""

    def __init__(self, ranks: int) -> None:
        self.passes: list[list[Sequence[int]]] = [[] for _ in range(ranks)]
        self.finish = [0.0] * ranks


class DealWays:
    """Ways to deal rows of these `lengths`, longest first; without `saves_padding`, in as few passes as can be."""

    def __init__(self, lengths: Sequence[int], ranks: Sequence[RankCost], saves_padding: bool) -> None:
        self._lengths = lengths
        self._ranks = ranks
        self._fixed = [each.cost.fixed_s for each in ranks]
        self._seconds = [each.cost.all_row_seconds(lengths) for each in ranks]
        self._by_speed = sorted(range(len(ranks)), key=lambda rank: self._seconds[rank][0])
        self._limited = [bool(each.tokens or each.rows) for each in ranks]
        self._saves_padding = saves_padding
        self._best_cut = self._cut(1)

    def least_seconds(self) -> float:
        """A bound that no way can beat, if the ranks differ in speed only and a batch has few lengths; else nearly so.

        The larger of (the least cost of the batch / the sum of speeds) and (the longest row on the fastest rank). The
        least cost is that of the best cuts on one device: any way to deal is also a way to cut.
        """
        alone = self._seconds_alone(self._best_cut, len(self._lengths))
        longest = min(fixed + seconds[0] for fixed, seconds in zip(self._fixed, self._seconds, strict=True))
        return max(longest, 1 / sum(1 / each for each in alone))

    def _seconds_alone(self, stops: Sequence[int], rows: int) -> list[float]:
        """Seconds of each rank if it computes the first rows alone, in these runs."""
        cuts = [0, *(stop for stop in stops if stop <= rows)]
        return [
            sum(fixed + (stop - start) * seconds[start] for start, stop in pairwise(cuts))
            for fixed, seconds in zip(self._fixed, self._seconds, strict=True)
        ]

    def try_all(self) -> Iterator[Hands]:
        """Every way to deal the batch, the better ones first as a rule; there is at least one."""
        tried = set[tuple[int, ...]]()
        for stops in self._list_cuts():
            for part in _BLOCK_PARTS:
                rows = min((0, *stops), key=lambda stop: abs(stop - part * len(self._lengths)))
                if (rows, *stops) in tried:
                    continue
                tried.add((rows, *stops))
                hands = self._deal_blocks(rows, stops)
                if hands is not None:
                    self._deal_singly(hands, rows, stops)
                    yield hands

    def _list_cuts(self) -> Iterator[list[int]]:
        """The runs by each price of a pass; the whole batch as one where padding isn't saved."""
        if not self._saves_padding:
            yield [len(self._lengths)]
            return
        yield self._best_cut
        for price in _DEARER:
            if price <= max(2, len(self._ranks) // 2):
                yield self._cut(price)

    def _cut(self, price: float) -> list[int]:
        """The ends of the runs that cost one device the least if a pass takes `price` times its fixed seconds.

        For each start of the last run, the cost of the rows up to a stop is a line over the stops, and the later the
        start, the flatter the line. So the lowest line is found by walking on, and lines that are never lowest go.
        """
        fast = self._by_speed[0]
        fixed, seconds = self._fixed[fast] * price, self._seconds[fast]
        lines: list[_Line] = []
        lowest, least, start, before = 0, 0.0, 0, {}
        for stop in self._list_places():
            line = seconds[start], least + fixed - start * seconds[start], start
            while len(lines) > lowest + 1 and _is_never_lowest(lines[-2], lines[-1], line):
                lines.pop()
            lines.append(line)
            while lowest + 1 < len(lines) and _at(lines[lowest + 1], stop) <= _at(lines[lowest], stop):
                lowest += 1
            least, before[stop] = _at(lines[lowest], stop), lines[lowest][2]
            start = stop
        stops = [len(self._lengths)]
        while before[stops[-1]]:
            stops.append(before[stops[-1]])
        return stops[::-1]

    def _list_places(self) -> Iterator[int]:
        """The places where the batch may be cut, its end last: where rows get shorter by a part of their length."""
        next_length = _NEXT_PLACE * self._lengths[0]
        for row, length in enumerate(self._lengths):
            if length <= next_length and row:
                yield row
                next_length = _NEXT_PLACE * length
        yield len(self._lengths)

    def _deal_blocks(self, rows: int, stops: Sequence[int]) -> Hands | None:
        """The first rows as one block for each rank, ending as early as can be; None where a row doesn't fit."""
        if not rows:
            return Hands(len(self._ranks))
        low = 1 / sum(1 / each for each in self._seconds_alone(stops, rows))
        best, high, margin = None, math.inf, _MARGIN
        for _ in range(_LIMITS):
            limit = (low + high) / 2 if best else low * (1 + margin)
            hands = self._lay_blocks(rows, stops, limit)
            if hands is None:
                low, margin = limit, 2 * margin
            else:
                best, high = hands, limit
        return best or self._lay_blocks(rows, stops, math.inf)

    def _lay_blocks(self, rows: int, stops: Sequence[int], limit: float) -> Hands | None:
        """Blocks laid one after the other, each as large as it can be by `limit` seconds; None if rows are left."""
        hands, row, run = Hands(len(self._ranks)), 0, 0
        for rank in self._by_speed:
            fixed, seconds, finish = self._fixed[rank], self._seconds[rank], 0.0
            while row < rows and (left := limit - finish - fixed) >= 0:
                each, space = seconds[row], stops[run] - row
                if self._limited[rank]:
                    space = int(min(space, self._ranks[rank].most_rows(self._lengths[row])))
                fit = space if each * space <= left else int(left // each)
                if not fit:
                    break
                hands.passes[rank].append(range(row, row + fit))
                finish += fixed + fit * each
                row += fit
                run += row == stops[run]
                if fit < space:
                    break
            hands.finish[rank] = finish
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
        """The end of a pass that the rank begins with the row; infinite if it can't hold it."""
        fits = self._ranks[rank].most_rows(self._lengths[row]) >= 1
        return finish + self._fixed[rank] + self._seconds[rank][row] if fits else math.inf


_Line = tuple[float, float, int]  # slope, offset, the start of a run


def _at(line: _Line, stop: int) -> float:
    return line[1] + stop * line[0]


def _is_never_lowest(steeper: _Line, line: _Line, flatter: _Line) -> bool:
    """True if one of its neighbours is below a line everywhere."""
    return (flatter[1] - steeper[1]) * (steeper[0] - line[0]) <= (line[1] - steeper[1]) * (steeper[0] - flatter[0])
