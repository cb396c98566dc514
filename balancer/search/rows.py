"""Choose layouts by their predicted speed, for rows that all cost the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from evener.plan.layout import Knots, cut_curve
from evener.shares.waterfill import Allocation

from ..families import device_counts, split_evenly
from ..objectives import find_objective
from ..types import End, Layout, PredictedCurve, Stage, layout_of, solo
from .layouts import NO_CURVE, same_measurement
from .machine_model import MachineModel
from .model.step_time import SAME_BATCH
from .observations import Turns
from .predictions import Predictions
from .ranking import LEAST_GAIN, is_tolerable, throughput

# fractions of the tolerance: first, the smallest batch predicted to be within the whole tolerance
# is tried, then the smallest within half of it; if neither turns out to be fast enough, the fastest
# batch wins, which may be twice as large
PARTS = (1.0, 0.5)
LIKELY_SETS = 2  # sets of efficient devices that are raced
SKETCHED = 24  # points of a curve that is drawn
# most devices of which all sets are tried (56 sets of 6); of more devices, only the most efficient
# 2, 3, ... are tried, which is worse on 13 of 240 machines with 2 to 4 devices
MOST_TO_COMBINE = 6


class RowPolicy:
    """Chooses which layouts to compare, for workloads whose rows all cost the same.

    `TextPolicy` does the same for rows of different lengths.
    """

    def __init__(self, machine: MachineModel) -> None:
        self.machine = machine
        self.predictions = Predictions(machine)
        self.problem = machine.problem
        self.seen = machine.seen

    def why_impossible(self) -> End | None:
        """Return None, because no reason is known in advance.

        If all rows cost the same, only measurements can show that no layout works.
        """
        return None

    def is_sensible(self, layout: Layout) -> bool:
        """Whether the layout may become the plan.

        Layouts on a single device are ruled out if the workload needs all devices, or if they use
        gradient accumulation although the batch is free.
        """
        if layout.traits.together:
            return True
        if self.problem.all_together:
            return False
        # a smaller batch in fewer passes would give the same samples/s
        return self.problem.global_batch is not None or not layout.in_passes

    def seconds_alone(self, layout: Layout) -> float | None:
        """Return how many seconds the slowest device would take for its rows on its own.

        A measured step that takes longer shows what training together costs. None if no device was
        measured.
        """
        seconds = []
        for position in layout.computing:
            curve = self.machine.devices[position].solo_curve
            if curve:
                seconds.append(curve.seconds(layout.shares[position]))
        return max(seconds, default=None)

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return each device's curve of compute time and its maximum rows, for the plan file.

        Curves are empty for devices without rows, and for layouts on a single device.
        """
        found = list(NO_CURVE * len(layout.shares))
        if not layout.traits.together:
            return tuple(found)
        batch = layout.global_batch
        for position in layout.active:
            device = self.machine.devices[position]
            if device.split_curve is not None:
                most = min(device.certain_rows, device.pass_rows or batch, batch)
                rows = max(most, layout.pass_rows[position])
                found[position] = cut_curve(device.split_curve, batch), rows
        return tuple(found)

    def predicted_curve(self, position: int) -> PredictedCurve:
        """Return the predicted step times of a device, as points to plot."""
        device = self.machine.devices[position]
        largest = device.guessed_rows or device.memory.largest_ran or None
        points: tuple[tuple[int, float], ...] = ()
        if device.solo_curve and largest:
            sizes = sorted({max(1, round(largest * n / SKETCHED)) for n in range(SKETCHED + 1)})
            points = tuple((size, device.solo_curve.seconds(size)) for size in sizes)
        return PredictedCurve(position, points, largest, device.memory.smallest_failed)

    # ------------------------------------------------------------------ one device

    def singles(self) -> list[Layout]:
        """Return the best layout on a single device; empty if no device can run the batch.

        If that layout uses gradient accumulation although one pass is sure to fit, the layout with
        one pass comes second.
        """
        ranked = self._singles_by_rate()
        if not ranked:
            return []
        whole = [layout for layout in ranked if self.seen.first_failure(layout) is None]
        best = (whole or ranked)[0]
        at_once = layout_of(best.shares)
        if best == at_once or not self.machine.is_sure_to_fit(at_once):
            return [best]
        return [best, at_once]

    def _singles_by_rate(self) -> list[Layout]:
        """Return the layouts on a single device, fastest first.

        If a global batch was requested, there is one layout for each device that can hold it. If
        the batch is free, they are the layouts that ran.
        """
        batch = self.problem.global_batch
        if batch is None:
            ran = [
                timed
                for timed in self.seen.timed(Stage.SOLO, Stage.REST)
                if not timed.probe.layout.in_passes
            ]
            fit = sorted(self.seen.still_fit(ran), key=lambda one: -one.samples_per_second)
            return list(dict.fromkeys(one.probe.layout for one in fit))
        devices = self.problem.devices
        layouts = [
            self.machine.lay_out_safely(solo(devices, i, batch).shares) for i in self.machine.live
        ]
        fitting = [layout for layout in layouts if layout]
        return sorted(fitting, key=lambda layout: -self.single_rate(layout, contended=False))

    def single_rate(self, layout: Layout, contended: bool = True) -> float:
        """Return the throughput of a layout on one device, predicted if it wasn't measured.

        With `contended`, measurements made while the other devices were busy count too.
        """
        timed = self.seen.timed_in(layout, Stage.REST)
        if not timed and contended:
            timed = self.seen.timed_in(layout, Stage.SOLO)
        return max(
            (one.samples_per_second for one in timed), default=self.machine.predicted_rate(layout)
        )

    def efficient(self) -> list[Layout]:
        """Return layouts with a high throughput per unit of a cost such as power.

        They are candidates for an objective that accepts a slower layout with lower costs.
        """
        fastest_alone = {layout.active[0]: layout for layout in reversed(self._singles_by_rate())}
        layouts = [*fastest_alone.values(), *map(self.predictions.layout, self._most_efficient())]
        return [layout for layout in layouts if self.machine.fits(layout)]

    def _most_efficient(self) -> list[Allocation]:
        """Return the splits with the highest throughput per unit of cost, such as per watt.

        Only splits at most `max_slowdown` slower than the fastest layout are considered. The best
        comes first. Empty until a cost is known.
        """
        objective = find_objective(self.problem.objective)
        costs = objective.costs(self.seen.timed(), self.problem.devices)
        if not costs:
            return []

        def value(allocation: Allocation) -> float:
            shares = dict(allocation.shares)
            cost = sum(active if i in shares else idle for i, (active, idle) in enumerate(costs))
            return allocation.samples_per_second / cost if cost else 0.0

        tops = [
            one.samples_per_second
            for one in (self.predictions.fastest_split, self.predictions.fastest_single)
            if one
        ]
        least = (1 - self.problem.max_slowdown) * max(tops, default=0.0)
        splits = [
            one for one in map(self.predictions.split_over, self._list_device_sets(costs)) if one
        ]
        enough = [split for split in splits if split.samples_per_second >= least]
        return sorted(enough, key=value, reverse=True)[:LIKELY_SETS]

    def _list_device_sets(self, costs: list[tuple[float, float]]) -> Iterator[tuple[int, ...]]:
        """Yield sets of devices that may be the most efficient.

        A set has at least two of the usable devices, but not all of them. `costs` lists each
        device's cost while it trains, and while it is idle.
        """
        counts = range(2, len(self.machine.live))
        if len(self.machine.live) <= MOST_TO_COMBINE:
            for count in counts:
                yield from combinations(self.machine.live, count)
            return
        rates = dict.fromkeys(self.machine.live, 0.0)
        for position in self.machine.live:
            alone = self.predictions.single(position)
            if alone:
                rates[position] = alone.samples_per_second
        order = sorted(self.machine.live, key=lambda i: -rates[i] / max(1.0, costs[i][0]))
        for count in counts:
            yield tuple(order[:count])

    # ------------------------------------------------------------------ several devices

    def best_splits(self) -> list[Layout]:
        """Return the layouts over several devices that belong in the final comparison.

        They are the layout with the smallest measured batch that is fast enough, those predicted to
        be better, and the fastest measured one.
        """
        found = self._split_rates()
        if not found:
            fastest = self.predictions.fastest_split if self.machine.splits else None
            layout = self.predictions.layout(fastest) if fastest else None
            return [layout] if layout and self.machine.is_sure_to_fit(layout) else []
        chosen = self._preferred_split(found)
        return [
            chosen,
            *self._promising_splits(chosen),
            max(found, key=lambda layout: found[layout]),
        ]

    def _split_rates(self) -> dict[Layout, float]:
        """Return the highest measured throughput of each layout over several devices."""
        batch = self.problem.global_batch
        found = [
            split
            for split in self.machine.fitting_splits
            if batch in (None, split.probe.layout.global_batch)
        ]
        # the highest value of a layout comes last, and is kept
        found.sort(key=lambda one: one.samples_per_second)
        return {one.probe.layout: one.samples_per_second for one in found}

    def _preferred_split(self, rates: dict[Layout, float]) -> Layout:
        """Return the split with the smallest batch that is fast enough.

        A split is fast enough if it is slower than the fastest one by at most the tolerance.
        `rates` gives the throughput of each split; there must be at least one.
        """
        tolerance = self.problem.tolerance if self.problem.global_batch is None else 0.0
        least = max(rates.values()) * (1 - tolerance)
        enough = [layout for layout, rate in rates.items() if rate >= least]
        return min(enough, key=lambda layout: (layout.global_batch, -rates[layout]))

    def _promising_splits(self, chosen: Layout) -> list[Layout]:
        """Return splits that are sure to fit and are predicted to be better than `chosen`.

        A split is better if it is clearly faster. If the batch is free, it is also better if it has
        a smaller batch and is fast enough.
        """
        found = list(self._smaller_splits(chosen))
        fastest = self.predictions.fastest_split
        least = self.machine.predicted_rate(chosen) * (1 + LEAST_GAIN)
        if fastest and fastest.samples_per_second > least:
            raced = [one.probe.layout for one in self.seen.timed_race()]
            found.append(self._nearest_raced(self.predictions.layout(fastest), raced))
        return [layout for layout in found if self.machine.is_sure_to_fit(layout)]

    def _smaller_splits(self, chosen: Layout) -> Iterator[Layout]:
        """Yield splits with smaller batches than `chosen` that are predicted to be fast enough."""
        tolerance = self.problem.tolerance
        ran = {
            one.probe.layout
            for one in (*self.seen.timed_race(), *self.machine.others_idle.values())
        }
        turns = {layout: self.seen.turns(layout) for layout in {*ran, *self._split_rates()}}
        leader = max(turns.values(), key=lambda turn: throughput(turn).value)
        for part in PARTS:
            # slower by the whole tolerance or, if that was measured as too slow, by half of it
            wanted = self.predictions.smallest_fast_enough(part)
            if wanted is None or wanted.global_batch == chosen.global_batch:
                return
            layout = self._nearest_raced(self.predictions.layout(wanted), turns)
            if layout not in turns:
                # a measured split replaces a predicted one
                layout = self._smallest_within(turns, leader, layout.global_batch) or layout
            yield layout
            if layout not in turns or is_tolerable(turns[layout], leader, tolerance):
                return

    def _smallest_within(
        self, turns: dict[Layout, Turns], leader: Turns, largest_batch: int
    ) -> Layout | None:
        """Return the measured layout with the smallest batch that is fast enough, or None.

        It may be slower than the fastest layout, whose measurements are `leader`, by at most the
        tolerance. Batches above `largest_batch` count only if they were measured again after being
        chosen, because one of many batches may seem fast enough by chance.
        """
        checked = {one.probe.layout for one in self.seen.in_stage(Stage.CHECK)}
        found = []
        for layout, taken in turns.items():
            wanted = layout.global_batch <= largest_batch or layout in checked
            if wanted and is_tolerable(taken, leader, self.problem.tolerance):
                found.append(layout)
        return min(found, key=lambda one: (one.global_batch, one.shares), default=None)

    def _nearest_raced(self, layout: Layout, measured: Iterable[Layout]) -> Layout:
        """Return the measured layout whose shares are nearly those of `layout`, if there is one.

        It is compared instead of `layout`, because measuring `layout` itself would show nothing
        new. If no measured layout is that close, `layout` is returned.
        """
        near = [one for one in measured if same_measurement(one, layout, SAME_BATCH)]
        batch = layout.global_batch

        def distance(layout: Layout) -> tuple[int, tuple[int, ...]]:
            return abs(layout.global_batch - batch), layout.shares

        return min(near, key=distance, default=layout)

    def even_splits(self, splits: Sequence[Layout], with_fewer_devices: bool) -> list[Layout]:
        """Return layouts with equal shares; empty if none fits.

        There is one over all usable devices. With `with_fewer_devices`, there are also layouts over
        the fastest 2, 4, ... devices. `splits` are the best known splits. If no global batch was
        requested, the first of them gives the batch.
        """
        order = sorted(self.machine.live, key=lambda i: -self.machine.devices[i].evidence.best_rate)
        counts = device_counts(len(order)) if with_fewer_devices else (len(order),)
        sets = [tuple(sorted(order[:count])) for count in counts if count > 1]
        found = [self._make_even_split(positions, splits, with_fewer_devices) for positions in sets]
        return [layout for layout in found if layout is not None]

    def _make_even_split(
        self, positions: tuple[int, ...], splits: Sequence[Layout], keep_batch: bool
    ) -> Layout | None:
        """Return the layout with equal shares over these devices, or None if it doesn't fit.

        With `keep_batch`, a requested global batch isn't reduced to make it fit.
        """
        count = len(positions)
        quantum = self.machine.quantum
        fixed = self.problem.global_batch
        wanted = fixed or self._even_batch(positions, splits)
        batch = max(wanted // quantum, count) * quantum
        even = split_evenly(self.problem.devices, positions, batch, quantum)
        safe = min(self.machine.devices[i].certain_rows for i in positions)
        if even is None or max(even.shares) <= safe:
            return even
        if fixed:
            # a fixed batch is computed in passes if necessary
            in_passes = self.machine.lay_out_safely(even.shares)
            if in_passes or keep_batch:
                return in_passes
        # the rows that certainly fit on all devices
        return split_evenly(self.problem.devices, positions, safe * count, quantum)

    def _even_batch(self, positions: tuple[int, ...], splits: Sequence[Layout]) -> int:
        """Return the global batch for equal shares over these devices, if none was requested.

        It is derived from the first of `splits`, the best known splits. If there are none, it is
        derived from the batches of single devices.
        """
        count = len(positions)
        if splits:
            # each device gets the mean rows per live device
            return splits[0].global_batch * count // len(self.machine.live)
        singles = reversed(self._singles_by_rate())
        best = {layout.active[0]: layout.global_batch for layout in singles}
        batch = min((best[i] for i in positions if i in best), default=0) * count
        return min(batch, self.problem.max_global_batch or batch)
