"""Assign the rows of a batch to ranks and passes if the rows have unequal lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from ..errors import RequestError
from ..plan.layout import Share
from ..shares.curves import Cost, RankCost
from ..shares.whole_rows import apportion, bounds, split_passes

_NEXT_PLACE = 0.97  # relative length of the longest row after a cut, at most
_TRIED_LIMITS = 7  # time limits that are tried for blocks
_MARGIN = 0.04  # relative difference between the first limit and the lower bound
# further prices of a pass that are tried, in multiples of its fixed time
_DEARER = (2, 4)
_BLOCK_PARTS = (0.8, 1.0, 0.5, 0.0)  # fractions of the batch that are assigned in blocks


class PartialAssignment:
    """The rows assigned to ranks and passes so far.

    `finish` is the time at which each rank would finish these rows, in seconds.
    """

    def __init__(self, ranks: int) -> None:
        self.passes: list[list[Sequence[int]]] = [[] for _ in range(ranks)]
        self.finish = [0.0] * ranks


class AssignmentSearch:
    """Searches for assignments of a batch's rows to ranks that let all ranks finish early.

    `lengths` are the rows' lengths in tokens, the longest first. If `saves_padding` is True, a rank
    may get several passes so that less padding is needed. Otherwise, it gets several passes only if
    its memory requires it.
    """

    def __init__(
        self, lengths: Sequence[int], ranks: Sequence[RankCost], saves_padding: bool
    ) -> None:
        self._lengths = lengths
        self._ranks = ranks
        self._fixed = [each.cost.fixed_s for each in ranks]
        self._seconds = [each.cost.all_row_seconds(lengths) for each in ranks]
        self._by_speed = sorted(range(len(ranks)), key=lambda rank: self._seconds[rank][0])
        self._limited = [bool(each.tokens or each.rows) for each in ranks]
        self._saves_padding = saves_padding
        self._best_cut = self._cut_cheapest(1)

    def least_seconds(self) -> float:
        """Estimate the shortest time in which the ranks can compute the batch, in seconds."""
        # The estimate is the larger of two times: that of all rows if they could be divided exactly
        # by the ranks' speeds, and that of the longest row on the fastest rank. It is approximate,
        # because the rows are assumed to be cut into passes as is cheapest on the fastest device.
        alone = self._seconds_alone(self._best_cut, len(self._lengths))
        longest = min(
            fixed + seconds[0] for fixed, seconds in zip(self._fixed, self._seconds, strict=True)
        )
        return max(longest, 1 / sum(1 / each for each in alone))

    def _seconds_alone(self, stops: Sequence[int], rows: int) -> list[float]:
        """Return the seconds that each rank would need to compute the first `rows` rows by itself.

        `stops` are the row indices at which passes end.
        """
        cuts = [0, *(stop for stop in stops if stop <= rows)]
        return [
            sum(fixed + (stop - start) * seconds[start] for start, stop in pairwise(cuts))
            for fixed, seconds in zip(self._fixed, self._seconds, strict=True)
        ]

    def try_all(self) -> Iterator[PartialAssignment]:
        """Yield different assignments of all rows. The caller can stop when one is good enough."""
        # Assignments differ in two ways: how the batch is cut into passes, and how much of it is
        # assigned in blocks of consecutive rows. The rest is assigned row by row.
        tried = set[tuple[int, ...]]()
        for stops in self._list_cuts():
            for part in _BLOCK_PARTS:
                rows = min((0, *stops), key=lambda stop: abs(stop - part * len(self._lengths)))
                if (rows, *stops) in tried:
                    continue
                tried.add((rows, *stops))
                partial = self._assign_blocks(rows, stops)
                if partial is not None:
                    for start, stop in pairwise((rows, *(stop for stop in stops if stop > rows))):
                        self._assign_run(partial, start, stop)
                    yield partial

    def _list_cuts(self) -> Iterator[list[int]]:
        """Yield ways to cut the sorted batch into passes, each as a list of end indices."""
        # Each pass is a run of consecutive rows. The ways differ in the assumed price of a pass.
        # Without passes to save padding, the whole batch is one run.
        if not self._saves_padding:
            yield [len(self._lengths)]
            return
        yield self._best_cut
        for price in _DEARER:
            if price <= max(2, len(self._ranks) // 2):
                yield self._cut_cheapest(price)

    def _cut_cheapest(self, price: float) -> list[int]:
        """Cut the batch into passes at the lowest cost, and return the end index of each pass.

        The cost includes the fixed time of each pass, multiplied by `price`. A higher price gives
        fewer passes.
        """
        # Passes are runs of consecutive rows. The cost is the time that the fastest device would
        # take for all runs, with the fixed time of a pass multiplied by `price`. For a given start
        # of the last run, the total cost is a linear function of the run's end: a line. A later
        # start gives a flatter line. Therefore the lowest line is only searched forward, and lines
        # that are never the lowest are dropped (the convex hull trick).
        fast = self._by_speed[0]
        fixed, seconds = self._fixed[fast] * price, self._seconds[fast]
        lines: list[_Line] = []
        lowest, least, start, before = 0, 0.0, 0, {}
        for stop in self._list_places():
            line = seconds[start], least + fixed - start * seconds[start], start
            while len(lines) > lowest + 1 and _is_never_lowest(lines[-2], lines[-1], line):
                lines.pop()
            lines.append(line)
            while lowest + 1 < len(lines) and _at(lines[lowest + 1], stop) <= _at(
                lines[lowest], stop
            ):
                lowest += 1
            least, before[stop] = _at(lines[lowest], stop), lines[lowest][2]
            start = stop
        stops = [len(self._lengths)]
        while before[stops[-1]]:
            stops.append(before[stops[-1]])
        return stops[::-1]

    def _list_places(self) -> Iterator[int]:
        """Yield the row indices at which a pass may end."""
        # To keep their number small, the row at each index is at least 3 % shorter than the one at
        # the previous index. The last index is the batch's end.
        next_length = _NEXT_PLACE * self._lengths[0]
        for row, length in enumerate(self._lengths):
            if length <= next_length and row:
                yield row
                next_length = _NEXT_PLACE * length
        yield len(self._lengths)

    def _assign_blocks(self, rows: int, stops: Sequence[int]) -> PartialAssignment | None:
        """Assign the first `rows` rows in consecutive blocks, one for each rank.

        A new pass begins at each row index in `stops`. Returns None if the rows don't fit in the
        ranks' memory.
        """
        # All ranks must finish within the same time limit; bisection finds the shortest one.
        if not rows:
            return PartialAssignment(len(self._ranks))
        low = 1 / sum(1 / each for each in self._seconds_alone(stops, rows))
        best, high, margin = None, math.inf, _MARGIN
        for _ in range(_TRIED_LIMITS):
            limit = (low + high) / 2 if best else low * (1 + margin)
            partial = self._fill_blocks(rows, stops, limit)
            if partial is None:
                low, margin = limit, 2 * margin
            else:
                best, high = partial, limit
        return best or self._fill_blocks(rows, stops, math.inf)

    def _fill_blocks(
        self, rows: int, stops: Sequence[int], limit: float
    ) -> PartialAssignment | None:
        """Assign the first `rows` rows in consecutive blocks, one for each rank.

        Each rank has to finish its block within `limit` seconds. It begins a new pass at each row
        index in `stops`, and where its memory requires it. Returns None if the ranks can't finish
        in time.
        """
        # One rank after another is filled, until the next row would exceed `limit` seconds.
        partial, row, run = PartialAssignment(len(self._ranks)), 0, 0
        for rank in self._by_speed:
            fixed, seconds, finish = self._fixed[rank], self._seconds[rank], 0.0
            while row < rows and (left := limit - finish - fixed) >= 0:
                each, space = seconds[row], stops[run] - row
                if self._limited[rank]:
                    space = int(min(space, self._ranks[rank].most_rows(self._lengths[row])))
                fit = space if each * space <= left else int(left // each)
                if not fit:
                    break
                partial.passes[rank].append(range(row, row + fit))
                finish += fixed + fit * each
                row += fit
                run += row == stops[run]
                if fit < space:
                    break
            partial.finish[rank] = finish
        return partial if row == rows else None

    def _assign_run(self, partial: PartialAssignment, start: int, stop: int) -> None:
        """Assign the rows from index `start` to `stop` one by one.

        Each row goes to the rank that would finish it first.
        """
        # These rows are called a run. A rank's first row of the run begins a new pass, and so does
        # a row that exceeds the rank's limits for the current pass.
        finish, passes, fixed, seconds = partial.finish, partial.passes, self._fixed, self._seconds
        opened: list[list[int]] = [[] for _ in finish]
        space: list[float] = [0] * len(finish)  # rows that the open pass may still take
        each = [own[start] for own in seconds]
        # each rank's finish time with one more row
        done = [
            self._finish_with_new_pass(rank, start, finish[rank]) for rank in range(len(finish))
        ]
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
            done[rank] = (
                finish[rank] + each[rank]
                if space[rank]
                else self._finish_with_new_pass(rank, row, finish[rank])
            )

    def _finish_with_new_pass(self, rank: int, row: int, finish: float) -> float:
        """Return when a rank would finish if a row began a new pass, or inf if the row doesn't fit.

        `row` is the row's index, and `finish` is when the rank finishes without it.
        """
        fits = self._ranks[rank].most_rows(self._lengths[row]) >= 1
        return finish + self._fixed[rank] + self._seconds[rank][row] if fits else math.inf


_Line = tuple[float, float, int]  # slope, offset, the start of a run


def _at(line: _Line, stop: int) -> float:
    return line[1] + stop * line[0]


def _is_never_lowest(steeper: _Line, line: _Line, flatter: _Line) -> bool:
    """Return True if the second of three lines is nowhere below both of the other lines.

    The lines are sorted by slope, with the steepest first.
    """
    return (flatter[1] - steeper[1]) * (steeper[0] - line[0]) <= (line[1] - steeper[1]) * (
        steeper[0] - flatter[0]
    )


# the search ends at this gap above the lower bound, which grows with the number of ranks
CLOSE_ENOUGH = 0.005
CLOSE_PER_RANK = 0.0025

# for each rank and pass, the indices of its rows in the batch
Passes = tuple[tuple[tuple[int, ...], ...], ...]


class RowAssignment(msgspec.Struct, frozen=True):
    """The assignment of a batch's rows to ranks and passes.

    `passes` lists, for each rank and pass, the indices of its rows in the batch. `seconds` are the
    ranks' predicted compute times. `tokens` and `padded` are each rank's numbers of tokens without
    and with padding.
    """

    passes: Passes
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each rank."""
        return tuple(sum(map(len, own)) for own in self.passes)

    @property
    def in_passes(self) -> bool:
        """True if any rank has several passes."""
        return any(len(own) > 1 for own in self.passes)


class RowAssigner(msgspec.Struct, frozen=True):
    """Divides batches among the ranks if their rows have unequal lengths.

    The result depends only on the rows' lengths, so it is the same on every rank.
    """

    ranks: tuple[RankCost, ...]
    ratios: tuple[float, ...]  # ratios of the ranks' rows if all rows are equally long
    saves_padding: bool = True  # adds passes to save padding; if False, only limits add passes

    def assign(self, lengths: Sequence[int]) -> RowAssignment:
        """Assign a batch's rows to ranks and passes, so that all ranks finish together.

        `lengths` are the rows' lengths in tokens. Each rank gets at least one row if there are
        enough rows.
        """
        # If all rows are equally long, they are assigned in their order, by the ratios of the
        # shares. Otherwise they are sorted first, to put rows of similar length into a pass: a pass
        # costs its number of rows times the cost of its longest row.
        if min(lengths) == max(lengths):
            return self._make(self._assign_equal(len(lengths), lengths[0]), lengths)
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        ways = AssignmentSearch([lengths[row] for row in order], self.ranks, self.saves_padding)
        enough = (1 + CLOSE_ENOUGH + CLOSE_PER_RANK * len(self.ranks)) * ways.least_seconds()
        best = next(found := ways.try_all())
        while max(best.finish) > enough and (partial := next(found, None)):
            best = min(best, partial, key=lambda each: max(each.finish))
        passes = [[list(each) for each in own] for own in best.passes]
        _give_each_a_row(passes)
        assigned = (
            tuple(tuple(sorted(map(order.__getitem__, each))) for each in own) for own in passes
        )
        return self._make(tuple(assigned), lengths)

    def check(self, lengths: Sequence[int], rows: int) -> None:
        """Check the lengths of all rows of the data, in tokens.

        `rows` is the number of rows in the data. Raises RequestError if the number of lengths
        differs from it, if a length is negative, or if the longest row fits on no device.
        """
        if len(lengths) != rows:
            raise RequestError(
                f"There are {len(lengths)} lengths for {rows} rows of data.",
                "Give one for each row, in their order.",
            )
        shortest, longest = min(lengths), max(lengths)
        if shortest < 0:
            raise RequestError(
                f"Row {lengths.index(shortest)} has length {shortest}.",
                "A length is tokens, 0 or more.",
            )
        if not any(rank.most_rows(longest) for rank in self.ranks):
            raise RequestError(
                f"Row {lengths.index(longest)} has {longest} tokens, and no device of the "
                f"plan holds more than"
                f" {max(rank.tokens for rank in self.ranks)} in a pass.",
                "Cut such rows or leave them out, or make a plan on a device with more memory.",
            )

    def _assign_equal(self, rows: int, length: int) -> Passes:
        assigned = []
        for rank, (first, last) in zip(
            self.ranks, bounds(apportion(rows, self.ratios)), strict=True
        ):
            sizes = split_passes(
                last - first, max(1, int(min(rank.most_rows(length), last - first)))
            )
            assigned.append(
                tuple(tuple(range(first + start, first + stop)) for start, stop in bounds(sizes))
            )
        return tuple(assigned)

    def _make(self, passes: Passes, lengths: Sequence[int]) -> RowAssignment:
        cut = [[(len(each), max(map(lengths.__getitem__, each))) for each in own] for own in passes]
        seconds = (
            sum(rank.cost.seconds(*each) for each in own)
            for rank, own in zip(self.ranks, cut, strict=True)
        )
        tokens = (sum(sum(map(lengths.__getitem__, each)) for each in own) for own in passes)
        padded = (sum(rows * length for rows, length in own) for own in cut)
        return RowAssignment(passes, tuple(seconds), tuple(tokens), tuple(padded))


def make_row_assigner(
    batches: Sequence[int], micros: Sequence[int], shares: Sequence[Share]
) -> RowAssigner:
    """Return a RowAssigner for the ranks of a plan.

    `batches` and `micros` are the ranks' rows per step and per pass. `shares` are the plan's
    shares, with the measured costs of rows if the plan has them.
    """
    # If the plan has no costs, each rank's tokens/s are assumed to be proportional to its rows in a
    # full batch. The cost of a further pass is then unknown, so a rank computes as few passes as
    # possible.
    ratios = tuple(map(float, batches))
    costs = [share.cost for share in shares if share.cost is not None]
    if costs:
        return RowAssigner(tuple(map(RankCost, costs, (share.tokens for share in shares))), ratios)
    ranks = (
        RankCost(Cost(0.0, 1.0 / batch, 0.0), rows=micro if micro < batch else 0)
        for batch, micro in zip(batches, micros, strict=True)
    )
    return RowAssigner(tuple(ranks), ratios, saves_padding=False)


def _give_each_a_row(passes: list[list[list[int]]]) -> None:
    """Change the assignment in place so that every rank has a row, if there are enough rows."""
    # The shortest row among all ranks with several rows is moved.
    for own in passes:
        givers = [each for each in passes if sum(map(len, each)) > 1]
        if not own and givers:
            giver = max(givers, key=lambda each: max(map(max, each)))
            last = max(giver, key=max)
            own.append([last.pop()])
            giver[:] = filter(None, giver)
