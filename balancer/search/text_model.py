"""The cost of rows of unequal length on each device, and the time of global batches that are assigned by cost.

Predictions assign batches drawn from the lengths of the data, as the training's loader does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from statistics import fmean

import msgspec

from evener.shares.curves import ROUNDING, Cost, RankCost, Work
from evener.shares.whole_rows import apportion
from evener.training.dealing import Deal, Dealer

from ..types import Layout, Observation, OutOfMemory, Problem, Timed
from .layouts import RETREAT, TIE
from .model.evidence import CLEAR, group_by, is_noise, relative_error
from .model.memory import SAFE_SHARE, Memory
from .observations import Observations
from .ranking import LEAST_RATE


class WorkPoint(msgspec.Struct, frozen=True):
    """One measured step; `error` is its relative standard error, at least TIE: real steps differ from any such cost."""

    work: Work
    seconds: float
    error: float


class StepCost(msgspec.Struct, frozen=True):
    """A device's cost of a step; `step_s` is what it takes beside its passes, such as the optimizer's time."""

    step_s: float
    cost: Cost

    def seconds(self, work: Work) -> float:
        """The seconds of a whole step."""
        return self.step_s + self.cost.seconds_for(work)

    def slowed(self, factor: float) -> StepCost:
        """The cost of a device that is slower by this factor."""
        slower = Cost(*(factor * rate for rate in msgspec.structs.astuple(self.cost)))
        return StepCost(factor * self.step_s, slower)


def fit_step_cost(points: Iterable[WorkPoint]) -> StepCost | None:
    """The cost that explains the points; None with too few.

    What isn't rows and tokens is a pass's, unless the points clearly say that it is a step's: passes that were taken to
    be free would be cut ever smaller.
    """
    found = list(points)
    if len(found) < len(Cost.__struct_fields__):
        return None
    works = [(one.work.passes, one.work.padded, one.work.padded_lengths) for one in found]
    seconds, errors = [one.seconds for one in found], [one.error * one.seconds for one in found]
    rates, missed = fit_rates([(0.0, *work) for work in works], seconds, errors)
    with_steps, less = fit_rates([(1.0, *work) for work in works], seconds, errors)
    step_s, *of_passes = with_steps if less < missed - CLEAR**2 else rates
    cost = Cost(*of_passes)
    return StepCost(step_s, cost) if cost.is_valid() else None


def fit_rates(
    rows: Sequence[Sequence[float]], values: Sequence[float], errors: Sequence[float]
) -> tuple[tuple[float, ...], float]:
    """Rates, none negative, with which the sum of rate * amount over each row is nearest to its value; what they miss.

    Distances count in standard errors of the values, squared and summed. Amounts that the rows can't tell apart get one
    of the rates alone.
    """
    scaled = ([amount / error for amount in row] for row, error in zip(rows, errors, strict=True))
    columns = [list(column) for column in zip(*scaled, strict=True)]
    sizes = [math.hypot(*column) or 1.0 for column in columns]
    units = [[amount / size for amount in column] for column, size in zip(columns, sizes, strict=True)]
    rates, missed = _nearest(units, [value / error for value, error in zip(values, errors, strict=True)])
    return tuple(rate / size for rate, size in zip(rates, sizes, strict=True)), missed


def _nearest(columns: Sequence[Sequence[float]], wanted: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """The rates of columns that are 1 long, and the square of what they miss: the better of two smaller problems.

    The last column is left out, or what it explains is taken out of all others (Gram and Schmidt).
    """
    if not columns:
        return (), _dot(wanted, wanted)
    *others, last = columns
    without, missed = _nearest(others, wanted)
    square = _dot(last, last)
    if square > ROUNDING**2:

        def residual(values: Sequence[float]) -> list[float]:
            part = _dot(last, values) / square
            return [value - part * each for value, each in zip(values, last, strict=True)]

        rates, less = _nearest(list(map(residual, others)), residual(wanted))
        own = (_dot(last, wanted) - math.fsum(r * _dot(last, c) for r, c in zip(rates, others, strict=True))) / square
        if own >= 0 and less < missed - ROUNDING:
            return (*rates, own), less
    return (*without, 0.0), missed


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


DRAWN_ROWS = 512  # that a prediction deals, or one batch: lengths that vary by half of their mean have it to 2 %
SMALLEST_BATCH = 4  # rows for each device, of a free global batch: fewer can't be dealt by cost
LARGEST_BATCH = 1024  # rows that are worth a prediction (CPU of ask)
_DRAW = 48271, (1 << 31) - 1  # MINSTD: its powers modulo this prime are random


class TextModel:
    """The costs by one set of observations, over the devices that are left."""

    def __init__(self, problem: Problem, seen: Observations, live: Sequence[int], longest_step: float | None) -> None:
        self.problem, self.seen, self._longest_step = problem, seen, longest_step
        self.live, self._hosts = tuple(live), problem.hosts or (0,) * problem.devices

    # ------------------------------------------------------------------ what was seen

    def tried_alone(self, position: int) -> tuple[Observation, ...]:
        """The observations of a device alone with rows of one length, or of a batch assigned by cost."""
        found = [seen for seen in self.seen.in_stage("solo") if not seen.probe.layout.by_rows]
        return tuple(seen for seen in found if seen.probe.layout.shares[position])

    @cached_property
    def splits(self) -> tuple[Timed, ...]:
        """Every split of exploration that was assigned by cost, in order."""
        splits = sorted(self.seen.in_stage("split"), key=lambda one: one.probe.turn)
        return tuple(one for one in splits if isinstance(one, Timed) and one.probe.layout.costs)

    @cached_property
    def mean_length(self) -> float:
        """Tokens of a row."""
        return fmean(self.problem.lengths)

    # ------------------------------------------------------------------ costs

    @cached_property
    def alone(self) -> tuple[StepCost | None, ...]:
        """Each device's cost as its own process, while the others are busy too; indistinguishable ones share one."""
        found: list[StepCost | None] = [None] * self.problem.devices
        for group in group_by(self.live, self._same_speed):
            cost = fit_step_cost(point for i in group for point in self._points(i).values())
            for i in group:
                found[i] = cost
        return tuple(found)

    def _same_speed(self, one: int, other: int) -> bool:
        """True if noise alone explains how two devices' times of the same passes differ."""
        ours, theirs = self._points(one), self._points(other)
        pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
        gaps = [math.log(a.seconds / b.seconds) for a, b in pairs]
        return is_noise(gaps, [math.hypot(a.error, b.error) for a, b in pairs])

    def _points(self, position: int) -> dict[tuple[int, ...], WorkPoint]:
        """The measured steps of a device alone, by rows, rows of a pass, and their length."""
        found: dict[tuple[int, ...], WorkPoint] = {}
        for seen in self.tried_alone(position):
            work, layout = _work(seen, position), seen.probe.layout
            if isinstance(seen, Timed) and work:
                key = layout.shares[position], layout.pass_rows[position], layout.length
                found[key] = WorkPoint(work, seen.step_seconds, max(relative_error(seen), TIE))
        return found

    @cached_property
    def costs(self) -> tuple[StepCost | None, ...]:
        """Each device's cost in splits: its cost alone, times the ratio of its own work in splits to that alone."""
        factors = [self._factor(i) for i in range(self.problem.devices)]
        return tuple(one and one.slowed(factor) for one, factor in zip(self.alone, factors, strict=True))

    def _factor(self, position: int) -> float:
        alone, own, expected = self.alone[position], 0.0, 0.0
        for one in self.splits:
            seconds, work = one.device_seconds[position], _work(one, position)
            if alone and seconds and work and all(one.device_seconds[i] for i in one.probe.layout.active):
                own, expected = own + seconds, expected + alone.seconds(work)
        return own / expected if own and expected else 1.0

    def _sync(self, positions: Sequence[int]) -> float:
        """The seconds of a split's step beyond the longest own work, over as many hosts; 0 before one was measured."""
        over, hosts = [], len({self._hosts[i] for i in positions})
        for one in self.splits:
            if len({self._hosts[i] for i in one.probe.layout.active}) == hosts:
                own = [self._own_seconds(one, i) for i in one.probe.layout.active]
                over.append(max(0.0, one.step_seconds - max(own)))
        return fmean(over) if over else 0.0

    @property
    def sync_seconds(self) -> float | None:
        """The cost of keeping as many devices in step as the last split has; None before one was measured."""
        return self._sync(self.splits[-1].probe.layout.active) if self.splits else None

    def _own_seconds(self, seen: Timed, position: int) -> float:
        cost, work = self.alone[position], _work(seen, position)
        return seen.device_seconds[position] or (cost.seconds(work) if cost and work else 0.0)

    # ------------------------------------------------------------------ memory

    @cached_property
    def walls(self) -> tuple[int, ...]:
        """The most padded tokens of a pass on each device; 0: no limit is known."""
        return tuple(self._wall(self.memory(i)) for i in range(self.problem.devices))

    @staticmethod
    def _wall(memory: Memory) -> int:
        most = memory.predict_largest()
        if most is None and memory.failed is None:
            return 0
        safe = int(SAFE_SHARE * most) if most is not None else 0
        return max(memory.ran, min(safe, int(RETREAT * memory.failed) if memory.failed else safe))

    def memory(self, position: int) -> Memory:
        """A device's bytes by the padded tokens of its largest pass."""
        points: dict[int, int] = {}
        full: list[int] = []
        for seen in (*self.tried_alone(position), *self.seen.in_stage("split", "race", "check")):
            tokens = self.largest_passes(seen.probe.layout)[position]
            if isinstance(seen, OutOfMemory) and tokens and position in (seen.devices or seen.probe.layout.active):
                full.append(tokens)
            used = seen.memory_bytes[position] if isinstance(seen, Timed) else None
            if used is not None and seen.probe.layout.length:
                points[tokens] = max(used, points.get(tokens, 0))
        ran = [tokens for tokens in points if not full or tokens < min(full)]
        return Memory(
            limit_bytes=self.seen.memory_limit(position),
            points=tuple(sorted(points.items())),
            ran=max(ran, default=0),
            failed=min(full, default=None),
            failures=len(full),
        )

    def largest_passes(self, layout: Layout) -> tuple[int, ...]:
        """The padded tokens of each device's largest pass; 0 where that isn't known."""
        if layout.by_rows:
            return (0,) * len(layout.shares)
        if layout.length:
            return tuple(rows * layout.length for rows in layout.pass_rows)
        dealt = zip(layout.shares, layout.tokens, strict=True)
        return tuple((tokens or share * round(self.mean_length)) if share else 0 for share, tokens in dealt)

    # ------------------------------------------------------------------ predictions

    @cached_property
    def able(self) -> tuple[int, ...]:
        """The devices whose cost is known."""
        return tuple(i for i in self.live if self.alone[i] is not None)

    def layout(self, positions: Sequence[int], batch: int) -> Layout:
        """A batch dealt over some of the devices; the shares are the mean numbers of rows."""
        devices = self.problem.devices
        sizes = [sum(each) for each in zip(*(one.sizes for one in self._deals(positions, batch)), strict=True)]
        rows = dict(zip(positions, apportion(batch, sizes), strict=True))
        costs = self.costs if len(positions) > 1 else self.alone
        return Layout(
            "split" if len(positions) > 1 else "solo",
            tuple(rows.get(i, 0) for i in range(devices)),
            costs=tuple(one.cost if (one := costs[i]) and i in rows else None for i in range(devices)),
            tokens=tuple(self.walls[i] if i in rows else 0 for i in range(devices)),
        )

    def seconds(self, positions: Sequence[int], batch: int) -> float:
        """The predicted time of one step."""
        costs = self.costs if len(positions) > 1 else self.alone
        beside = [one.step_s if (one := costs[i]) else 0.0 for i in positions]
        steps = [max(map(sum, zip(beside, one.seconds, strict=True))) for one in self._deals(positions, batch)]
        return fmean(steps) + (self._sync(positions) if len(positions) > 1 else 0.0)

    def same_dealing(self, one: Layout, other: Layout) -> bool:
        """True if no measurement could tell apart how two layouts assign rows: their costs differ by one factor."""
        if (one.active, one.global_batch, one.tokens) != (other.active, other.global_batch, other.tokens):
            return False
        length = round(self.mean_length)
        pairs = [(a, b) for a, b in zip(one.costs, other.costs, strict=True) if a and b]
        ratios = [a.seconds(1, length) / b.seconds(1, length) for a, b in pairs]
        return max(ratios) <= min(ratios) * (1 + TIE)

    def can_hold(self, positions: Sequence[int]) -> bool:
        """True if one of these devices holds the longest row."""
        return any(self.walls[i] == 0 or self.walls[i] >= self.problem.lengths[-1] for i in positions)

    def predicted_rate(self, layout: Layout) -> float:
        """Samples/s of a layout with rows assigned by cost, even if it doesn't assign them so; 0 for unknown costs."""
        if not set(self.able).issuperset(layout.active):
            return 0.0
        return layout.global_batch / max(self.seconds(layout.active, layout.global_batch), LEAST_RATE)

    @cached_property
    def best_split(self) -> Layout | None:
        """The devices that together should be fastest, with a batch dealt to them; None if there are fewer than two."""
        hosts = (tuple(i for i in self.able if self._hosts[i] == host) for host in sorted(set(self._hosts)))
        groups = (self.able, *hosts)
        found = [self._without_idle(group) for group in groups if len(group) > 1 and self.can_hold(group)]
        fastest = min(found, key=lambda group: self.seconds(group, self.batch), default=None)
        return self.layout(fastest, self.batch) if fastest else None

    def _without_idle(self, devices: Sequence[int]) -> list[int]:
        """Two or more of the devices: those that don't only keep the others waiting."""
        chosen = list(devices)
        while len(chosen) > 2:
            slowest = max(chosen, key=lambda i: self.seconds((i,), self.batch))
            fewer = [i for i in chosen if i != slowest]
            if not self.can_hold(fewer) or self.seconds(fewer, self.batch) >= self.seconds(chosen, self.batch):
                break
            chosen = fewer
        return chosen

    @cached_property
    def batch(self) -> int:
        """The global batch: the fixed one, else the smallest that is within the tolerance of the fastest."""
        problem = self.problem
        if problem.global_batch is not None:
            return problem.global_batch
        rates: dict[int, float] = {}
        for batch in self._batches():
            seconds = self.seconds(self.able, batch)
            if rates and self._longest_step is not None and seconds > self._longest_step:
                break
            rates[batch] = batch / seconds
        least = max(rates.values()) * (1 - problem.tolerance)
        return min(batch for batch, rate in rates.items() if rate >= least)

    def _batches(self) -> Iterator[int]:
        problem, quantum = self.problem, self.problem.multiple_of
        most = max(quantum, min(LARGEST_BATCH, problem.max_global_batch or LARGEST_BATCH) // quantum * quantum)
        batch = -(-SMALLEST_BATCH * len(self.able) // quantum) * quantum
        while batch < most:
            yield batch
            batch *= 2
        yield most

    def _deals(self, positions: Sequence[int], batch: int) -> Sequence[Deal]:
        key = tuple(positions), batch
        if key not in self._dealt:
            costs = self.costs if len(positions) > 1 else self.alone
            ranks = tuple(RankCost(one.cost, self.walls[i]) for i in positions if (one := costs[i]))
            rates = tuple(1 / one.cost.seconds(1, round(self.mean_length)) for one in ranks)
            self._dealt[key] = [Dealer(ranks, rates).deal(lengths) for lengths in self._draw(batch)]
        return self._dealt[key]

    @cached_property
    def _dealt(self) -> dict[tuple[tuple[int, ...], int], Sequence[Deal]]:
        return {}

    def _draw(self, batch: int) -> Iterator[list[int]]:
        """Global batches of rows of the data's lengths, the same in every search."""
        lengths, rows, (factor, prime) = self.problem.lengths, range(max(batch, DRAWN_ROWS // batch * batch)), _DRAW
        drawn = [lengths[pow(factor, row + 1, prime) * len(lengths) // prime] for row in rows]
        return (drawn[first : first + batch] for first in rows[::batch])


def _work(seen: Observation, position: int) -> Work | None:
    return seen.work[position] if isinstance(seen, Timed) and seen.work else None
