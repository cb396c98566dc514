"""Predict step times for rows of unequal length, such as texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from statistics import fmean

import msgspec

from evener.shares.curves import ROUNDING, Cost, RankCost, Work
from evener.shares.whole_rows import apportion
from evener.training.row_assignment import RowAssigner, RowAssignment

from ..types import Layout, Observation, OutOfMemory, Stage, Timed
from .layouts import RETREAT, TIE
from .machine_model import MachineModel
from .model.evidence import CLEAR, FEWEST_SIZES, group_by, is_noise, relative_error
from .model.memory import SAFE_SHARE, Memory, read_memory
from .ranking import LEAST_RATE


class WorkPoint(msgspec.Struct, frozen=True):
    """A measured step: what was computed, how long it took, and its relative standard error."""

    work: Work
    seconds: float
    error: float


class StepCost(msgspec.Struct, frozen=True):
    """The cost of a step on one device: fixed seconds per step, and the cost of its passes."""

    step_s: float
    cost: Cost

    def seconds(self, work: Work) -> float:
        """Return the predicted time, in seconds, of a step that does this work."""
        return self.step_s + self.cost.seconds_for(work)

    def slowed(self, factor: float) -> StepCost:
        """Return the cost on a device that is `factor` times as slow."""
        slower = Cost(*(factor * rate for rate in msgspec.structs.astuple(self.cost)))
        return StepCost(factor * self.step_s, slower)


def fit_step_cost(points: Sequence[WorkPoint]) -> StepCost | None:
    """Fit the cost of a step on a device to its measured steps; None if there are too few."""
    if len(points) < FEWEST_SIZES:
        return None
    works = [(point.work.passes, point.work.padded, point.work.padded_lengths) for point in points]
    seconds = [point.seconds for point in points]
    errors = [point.error * point.seconds for point in points]
    rates, missed = fit_rates([(0.0, *work) for work in works], seconds, errors)
    with_steps, less = fit_rates([(1.0, *work) for work in works], seconds, errors)
    # in doubt, time belongs to passes: if they seemed free, rows would get ever smaller passes
    step_s, *of_passes = with_steps if less < missed - CLEAR**2 else rates
    cost = Cost(*of_passes)
    return StepCost(step_s, cost) if cost.is_valid() else None


def fit_rates(
    rows: Sequence[Sequence[float]], values: Sequence[float], errors: Sequence[float]
) -> tuple[tuple[float, ...], float]:
    """Fit the time per unit of each kind of work, by weighted non-negative least squares.

    Each row of `rows` has the amounts of work in one measurement, for example of passes and tokens.
    `values` are the measured seconds, and `errors` their standard errors. Returns the seconds per
    unit of each kind, and the weighted sum of squared residuals.
    """
    scaled = [[amount / error for amount in row] for row, error in zip(rows, errors, strict=True)]
    columns = [list(column) for column in zip(*scaled, strict=True)]
    sizes = [math.hypot(*column) or 1.0 for column in columns]
    units = [
        [amount / size for amount in column] for column, size in zip(columns, sizes, strict=True)
    ]
    wanted = [value / error for value, error in zip(values, errors, strict=True)]
    rates, missed = _solve_non_negative(units, wanted)
    return tuple(rate / size for rate, size in zip(rates, sizes, strict=True)), missed


def _solve_non_negative(
    columns: Sequence[Sequence[float]], wanted: Sequence[float]
) -> tuple[tuple[float, ...], float]:
    """Solve a least-squares problem whose coefficients must not be negative.

    The weighted sum of the columns is to approximate `wanted`. Returns the coefficients and the sum
    of squared residuals. Every subset of columns is tried, so this is meant for few columns only.
    The caller scales each column to norm 1, unless all of its values are 0.
    """
    if not columns:
        return (), _dot(wanted, wanted)
    *others, last = columns
    # the last rate is 0: drop its column
    without, missed = _solve_non_negative(others, wanted)
    square = _dot(last, last)
    if square <= ROUNDING**2:
        # projections left nothing of a column that is collinear with later ones
        return (*without, 0.0), missed

    def residual(values: Sequence[float]) -> list[float]:
        part = _dot(last, values) / square
        return [value - part * each for value, each in zip(values, last, strict=True)]

    # the last rate is positive: the residual is orthogonal to its column, so project the column out
    # of all others (Gram-Schmidt)
    rates, less = _solve_non_negative(list(map(residual, others)), residual(wanted))
    explained = math.fsum(
        rate * _dot(last, column) for rate, column in zip(rates, others, strict=True)
    )
    own = (_dot(last, wanted) - explained) / square
    if own >= 0 and less < missed - ROUNDING:
        return (*rates, own), less
    return (*without, 0.0), missed


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


# rows drawn for a prediction, in whole batches and at least one batch; their mean length is within
# 2 % of the data's if the standard deviation of lengths is half their mean
DRAWN_ROWS = 512
SMALLEST_BATCH = 4  # rows per device of a free global batch: fewer can't be distributed by cost
LARGEST_BATCH = 1024  # most rows to predict for (limits the CPU time of ask)
DRAWS_KEPT = 128  # cache size: the batches of about four models (limits the CPU time of ask)
_DRAW = 48271, (1 << 31) - 1  # MINSTD: powers of this factor modulo this prime are pseudo-random


class TextModel(MachineModel):
    """Predicts step times if rows differ in length and are assigned to devices by their cost."""

    by_rows = False

    # ------------------------------------------------------------------ what was seen

    def tried_alone(self, position: int) -> list[Observation]:
        """Return the device's solo-stage observations of layouts whose rows are assigned by length.

        This includes probes in which all rows had one length, to find out what that length costs.
        """
        own = (
            seen for seen in self.seen.in_stage(Stage.SOLO) if seen.probe.layout.shares[position]
        )
        return [seen for seen in own if not seen.probe.layout.by_rows]

    def single_passes(self, position: int) -> dict[int, float]:
        """Return the measured times, in seconds, of steps with a single pass of rows of one length.

        The keys are the numbers of tokens in the pass.
        """
        found = {}
        for seen in self.tried_alone(position):
            layout = seen.probe.layout
            if isinstance(seen, Timed) and layout.length and not layout.in_passes:
                found[layout.global_batch * layout.length] = seen.step_seconds
        return found

    @cached_property
    def usual_length(self) -> int:
        """The mean length of a row in tokens, rounded."""
        return round(fmean(self.problem.lengths))

    # ------------------------------------------------------------------ costs

    @cached_property
    def costs_alone(self) -> tuple[StepCost | None, ...]:
        """The cost of a step on each device when it trains by itself; None where it is unknown.

        The device then shares its batch with no other. Other devices may be running steps of their
        own at the same time.
        """
        found: dict[int, StepCost | None] = {}
        for group in group_by(self.live, self._same_speed):
            cost = fit_step_cost([point for i in group for point in self._points_alone(i).values()])
            found.update(dict.fromkeys(group, cost))
        return tuple(map(found.get, range(self.problem.devices)))

    def _same_speed(self, one: int, other: int) -> bool:
        """Whether two devices took the same time, within noise, for all steps that both ran."""
        ours = self._points_alone(one)
        theirs = self._points_alone(other)
        gaps = []
        for key in ours:
            if key not in theirs:
                continue
            a, b = ours[key], theirs[key]
            gaps.append((math.log(a.seconds / b.seconds), math.hypot(a.error, b.error)))
        return is_noise(gaps)

    def _points_alone(self, position: int) -> dict[tuple[int, ...], WorkPoint]:
        """Return the steps that were measured on only this device.

        The keys are the number of rows, the micro-batch and the row length. The row length is 0 for
        rows of several lengths.
        """
        found: dict[tuple[int, ...], WorkPoint] = {}
        for seen in self.tried_alone(position):
            layout = seen.probe.layout
            work = _work(seen, position)
            if isinstance(seen, Timed) and work:
                key = layout.shares[position], layout.pass_rows[position], layout.length
                found[key] = WorkPoint(work, seen.step_seconds, max(relative_error(seen), TIE))
        return found

    @cached_property
    def costs(self) -> tuple[StepCost | None, ...]:
        """The cost of a step on each device while it trains with the others.

        None where it is unknown.
        """
        return tuple(
            one and one.slowed(self._contention_factor(i, one))
            for i, one in enumerate(self.costs_alone)
        )

    def _contention_factor(self, position: int, alone: StepCost) -> float:
        """Return how many times slower the device is while others compute too; 1.0 if unknown.

        `alone` is the cost of a step on this device when it trains on its own.
        """
        own = 0.0
        expected = 0.0
        for split in self.splits:
            seconds = split.device_seconds[position]
            work = _work(split, position)
            all_known = all(split.device_seconds[i] for i in split.probe.layout.active)
            if seconds and work and all_known:
                own += seconds
                expected += alone.seconds(work)
        return own / expected if own and expected else 1.0

    def _costs_of(self, positions: Sequence[int]) -> list[StepCost]:
        """Return the known costs of devices that train together, or of one device on its own."""
        costs = self.costs if len(positions) > 1 else self.costs_alone
        found = [costs[i] for i in positions]
        return [one for one in found if one]

    def predict_parts(self, split: Timed) -> list[float]:
        """Return the predicted compute time of each device in a measured split, in seconds.

        Devices without a known cost are left out.
        """
        found = []
        for position in split.probe.layout.active:
            cost = self.costs_alone[position]
            work = _work(split, position)
            if cost and work:
                found.append(cost.seconds(work))
        return found

    # ------------------------------------------------------------------ memory

    @cached_property
    def token_limits(self) -> tuple[int, ...]:
        """The most tokens of a pass, including padding, that fit on each device; 0 if unknown."""
        return tuple(self._token_limit(self.memory(i)) for i in range(self.problem.devices))

    @staticmethod
    def _token_limit(memory: Memory) -> int:
        """Return the most tokens that fit in memory, with headroom; 0 if unknown."""
        most = memory.predict_largest()
        if most is None and memory.smallest_failed is None:
            return 0
        predicted = SAFE_SHARE * (most or 0)
        below_failed = RETREAT * (memory.smallest_failed or math.inf)
        return max(memory.largest_ran, int(min(predicted, below_failed)))

    def memory(self, position: int) -> Memory:
        """Return how the device's memory use depends on the number of tokens in a pass."""
        points: dict[int, int] = {}
        full: list[int] = []
        for seen in (
            *self.tried_alone(position),
            *self.seen.in_stage(Stage.SPLIT, Stage.RACE, Stage.CHECK),
        ):
            layout = seen.probe.layout
            tokens = self._largest_pass(layout, position)
            if (
                isinstance(seen, OutOfMemory)
                and tokens
                and position in (seen.devices or layout.active)
            ):
                full.append(tokens)
            if isinstance(seen, Timed) and layout.length:
                used = seen.memory_bytes[position]
                if used is not None:
                    points[tokens] = max(used, points.get(tokens, 0))
        return read_memory(self.seen.memory_limit(position), points, points, full)

    def _largest_pass(self, layout: Layout, position: int) -> int:
        """Return the token count of the layout's largest pass on a device."""
        if layout.costs:
            return layout.tokens[position] or layout.shares[position] * self.usual_length
        return layout.pass_rows[position] * layout.length

    # ------------------------------------------------------------------ predictions

    @cached_property
    def devices_with_cost(self) -> tuple[int, ...]:
        """The positions of usable devices whose cost is known."""
        return tuple(i for i in self.live if self.costs_alone[i] is not None)

    def layout(self, positions: Sequence[int], batch: int) -> Layout:
        """Return the layout that divides a batch among these devices by the cost of its rows."""
        devices = range(self.problem.devices)
        batches = [one.sizes for one in self._batches(positions, batch)]
        sizes = [sum(each) for each in zip(*batches, strict=True)]
        rows = dict(zip(positions, apportion(batch, sizes), strict=True))
        costs = dict(zip(positions, self._costs_of(positions), strict=True))
        return Layout(
            "split" if len(positions) > 1 else "solo",
            tuple(rows.get(i, 0) for i in devices),
            costs=tuple(costs[i].cost if i in costs else None for i in devices),
            tokens=tuple(self.token_limits[i] if i in rows else 0 for i in devices),
        )

    def seconds(self, positions: Sequence[int], batch: int) -> float:
        """Return the predicted step time in seconds, as a mean over sample batches of the data.

        Gradient exchange is included.
        """
        beside_passes = [one.step_s for one in self._costs_of(positions)]
        steps = [
            max(map(sum, zip(beside_passes, one.seconds, strict=True)))
            for one in self._batches(positions, batch)
        ]
        return fmean(steps) + self.exchange_seconds(positions)

    def can_hold(self, positions: Sequence[int]) -> bool:
        """Whether at least one of these devices has enough memory for the longest row.

        A device whose limit isn't known counts as large enough.
        """
        return any(
            self.token_limits[i] == 0 or self.token_limits[i] >= self.problem.lengths[-1]
            for i in positions
        )

    def predicted_rate(self, layout: Layout) -> float:
        """Return the predicted throughput of a layout; 0 if the cost of a device is unknown."""
        rows = layout.global_batch
        steps = self.single_passes(layout.active[0]) if layout.length else {}
        # a cost that was fitted to small passes predicts too little time for large ones
        if steps:
            largest = max(steps)
            longer = max(1.0, rows * layout.length / largest)
            return rows / steps[largest] / longer
        if not set(self.devices_with_cost).issuperset(layout.active):
            return 0.0
        return rows / max(self.seconds(layout.active, rows), LEAST_RATE)

    @cached_property
    def best_split(self) -> Layout | None:
        """The layout over several devices with the shortest predicted step, or None."""
        able = sorted(self.devices_with_cost, key=lambda i: self.seconds((i,), self.batch))
        hosts = sorted(set(self.hosts))
        on_one_host = [[i for i in able if self.hosts[i] == host] for host in hosts]
        found = []
        for team in (able, *on_one_host):
            # all of them, then without the slowest, ..., down to the two fastest
            found += [sorted(team[:count]) for count in range(len(team), 1, -1)]
        holding = [team for team in found if self.can_hold(team)]
        if not holding:
            return None
        fastest = min(holding, key=lambda team: self.seconds(team, self.batch))
        return self.layout(fastest, self.batch)

    @cached_property
    def batch(self) -> int:
        """The global batch: the requested one, or else the smallest that is fast enough.

        A batch is fast enough if it is slower than the fastest by at most the tolerance.
        """
        problem = self.problem
        if problem.global_batch is not None:
            return problem.global_batch
        sizes = self._free_batches()
        seconds = {batch: self.seconds(self.devices_with_cost, batch) for batch in sizes}
        longest = max(self.time.longest_step(), seconds[sizes[0]])
        rates = {batch: batch / step for batch, step in seconds.items() if step <= longest}
        least = max(rates.values()) * (1 - problem.tolerance)
        return min(batch for batch, rate in rates.items() if rate >= least)

    def _free_batches(self) -> list[int]:
        """Return the global batches to choose from; each is twice as large as the one before."""
        quantum = self.quantum
        asked = min(LARGEST_BATCH, self.problem.max_global_batch or LARGEST_BATCH)
        most = max(quantum, asked // quantum * quantum)
        least = -(-SMALLEST_BATCH * len(self.devices_with_cost) // quantum) * quantum
        doublings = range(LARGEST_BATCH.bit_length())
        return sorted({min(most, least << times) for times in doublings})

    def _batches(self, positions: Sequence[int], batch: int) -> Sequence[RowAssignment]:
        costs = self._costs_of(positions)
        ranks = [
            RankCost(cost.cost, self.token_limits[i])
            for i, cost in zip(positions, costs, strict=True)
        ]
        return _draw_batches(tuple(ranks), self.problem.lengths, batch)


@lru_cache(DRAWS_KEPT)
def _draw_batches(
    ranks: tuple[RankCost, ...], lengths: tuple[int, ...], batch: int
) -> Sequence[RowAssignment]:
    """Draw sample batches from the data's row lengths, and assign their rows to the devices.

    The same lengths are drawn in every search. `ranks` has the cost of rows on each device.
    """
    factor, prime = _DRAW
    rows = range(max(batch, DRAWN_ROWS // batch * batch))
    drawn = [lengths[pow(factor, row + 1, prime) * len(lengths) // prime] for row in rows]
    mean = round(fmean(lengths))
    assigner = RowAssigner(ranks, tuple(1 / rank.cost.seconds(1, mean) for rank in ranks))
    return [assigner.assign(drawn[first : first + batch]) for first in rows[::batch]]


def _work(seen: Observation, position: int) -> Work | None:
    return seen.work[position] if isinstance(seen, Timed) and seen.work else None
