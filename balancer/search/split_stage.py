"""The second stage: a few real synchronous steps, each predicted from the previous observations.

The first split is the fastest that the solo curves predict. Its step gives the cost of gradient
exchange and, if the devices' compute times (own work) are reported, one more point of every curve.
The stage ends when the predicted split has already been measured, or promises at most 0.2 % more
samples/s than the layouts that ran. One device alone, while the others are idle, is measured if it
may be faster than every split. For a fixed batch, the fastest device alone is even measured before
the first split if its two steps take little of the remaining time: the splits are compared with it
in any case, and it needs no new child processes.
"""

from __future__ import annotations

from functools import cached_property

from evener.shares.waterfill import Allocation

from ..types import Failed, Layout, Observation, Probe, Stage, Timed
from .budget import Budget
from .layouts import same_measurement
from .model.step_time import SAME_BATCH
from .observations import MOST_TURNS, TRIES
from .predictions import Predictions, fastest
from .ranking import LEAST_RATE
from .time_left import LONE_STEPS, SHORTEST_PROBE_SECONDS


class SplitStage:
    """Chooses the splits to measure, and a device to measure while the others are idle.

    It chooses no splits unless `splits` is True.
    """

    def __init__(self, predictions: Predictions, budget: Budget, splits: bool) -> None:
        self._predictions = predictions
        self._machine = predictions.machine
        self._budget = budget
        self._with_splits = splits
        self._seen = self._machine.seen
        self._problem = predictions.problem

    def next_probe(self) -> Probe | None:
        """Return a probe of the next split, or of one device with the others idle.

        Return None when the stage is over.
        """
        if len(self._seen.in_stage(Stage.SPLIT, Stage.REST)) >= MOST_TURNS:
            return None
        first = self._probe_first_single()
        if first:
            return first
        wanted = self._next_split() if self._with_splits else None
        found = self._probe(wanted or self._next_single())
        if found or wanted is None or self._machine.splits:
            return found
        return self._probe(self._predictions.split_within(self._longest_first_step(wanted)))

    def _least_seconds(self, wanted: Allocation) -> float:
        return self._budget.least_seconds(self._predictions.layout(wanted), wanted.seconds)

    def _probe(self, wanted: Allocation | None, after: float = 0.0) -> Probe | None:
        """Return the probe of an allocation; None if `wanted` is None or the budget is too small.

        The probe must leave `after` seconds for later probes. If there is only time for a single
        step, the probe times just this step, and is returned only if the allocation promises more
        samples/s than all layouts that ran.
        """
        if wanted is None:
            return None
        layout = self._predictions.layout(wanted)
        seconds = wanted.seconds
        stage: Stage = Stage.SPLIT if layout.traits.together else Stage.REST
        if not self._machine.splits and not self._machine.others_idle:
            layout, seconds = self._use_passes_that_ran(layout, seconds)
        ends_with: Stage = stage if self._machine.splits else Stage.RACE
        least = self._budget.least_seconds(layout, seconds)
        affordable = self._budget.affords(layout, ends_with, seconds, reserved=after)
        if affordable and (not after or self._budget.has_time(least, after)):
            most = self._budget.probe_seconds(layout, stage, step_seconds=seconds)
            return Probe(layout, stage, most)
        lone = self._budget.affords(layout, Stage.RACE, seconds, reserved=after, steps=LONE_STEPS)
        if lone and wanted.samples_per_second > self._best_rate:
            return Probe(layout, stage, min(SHORTEST_PROBE_SECONDS, round(seconds / 2, 3)))
        return None

    @cached_property
    def _best_rate(self) -> float:
        """The highest samples/s of the layouts that ran and could be the plan.

        For splits, these are the samples/s that are now predicted. For single devices, they are the
        samples/s that were measured while the others were idle.
        """
        splits = [
            self._machine.predicted_rate(one.probe.layout) for one in self._machine.fitting_splits
        ]
        others_idle = [one.samples_per_second for one in self._machine.others_idle.values()]
        return max((*splits, *others_idle), default=0.0)

    def _use_passes_that_ran(self, layout: Layout, seconds: float) -> tuple[Layout, float]:
        """Return the layout to probe and the duration of its step, with safer passes if necessary.

        `layout` is the search's first split or single device, and `seconds` the duration of its
        step. Its passes are replaced by safer ones if one of its devices ran out of memory before
        and there is no time for a second attempt. Safer passes have sizes that ran before or
        certainly fit.
        """
        least = self._budget.least_seconds(layout, seconds)
        full = any(self._machine.devices[i].memory.failure_count for i in layout.active)
        safe = self._machine.lay_out_safely(layout.shares) if full else None
        if safe is None or self._budget.affords(layout, Stage.RACE, seconds, reserved=least):
            return layout, seconds
        return safe, layout.global_batch / max(self._machine.predicted_rate(safe), LEAST_RATE)

    def _next_split(self) -> Allocation | None:
        """Return the fastest predicted split if it is worth measuring, else None.

        It isn't worth measuring if it promises too little gain, if a similar split was tried, or if
        splits have failed twice.
        """
        tried = self._seen.in_stage(Stage.SPLIT)
        failed = sum(isinstance(seen, Failed) for seen in tried)
        if failed >= TRIES:  # a network that fails takes minutes each time
            return None
        wanted = self._predictions.fastest_split
        if wanted is None or not self._gains(wanted):
            return None
        layout = self._predictions.layout(wanted)
        if not layout.traits.together or any(_is_like(layout, seen) for seen in tried):
            return None
        return wanted

    def _gains(self, wanted: Allocation) -> bool:
        """True if the allocation should clearly gain over all measured splits and single devices.

        Also True before any split was measured.
        """
        if not self._machine.fitting_splits:
            return True
        raced = [self._seen.turns(seen.probe.layout) for seen in self._seen.timed_race()]
        rates = [one.samples_per_second for turns in raced for one in turns.values()]
        best = max(self._best_rate, self._predictions.best_single_rate, *rates)
        return wanted.samples_per_second > best * (1 + self._budget.least_gain)

    def _probe_first_single(self) -> Probe | None:
        """Return a probe of the fastest device alone, if it should precede the first split.

        This is only for a fixed batch. Without this probe, a short search could end with only a
        split, which may be much slower than the device. Return None if the probe would leave no
        time for a split that promises more.
        """
        if self._problem.global_batch is None or not self._with_splits:
            return None
        if len(self._machine.live) < 2 or self._machine.splits or self._seen.in_stage(Stage.REST):
            return None
        single = self._predictions.fastest_single
        split = self._predictions.fastest_split
        if single is None or split is None:
            return self._probe(single)
        after = self._least_seconds(split)
        layout = self._predictions.layout(single)
        seconds = self._budget.least_seconds(layout, single.seconds, LONE_STEPS)
        if self._budget.has_time(seconds, after):
            return self._probe(single, after)
        if single.samples_per_second > split.samples_per_second:
            return self._probe(single)
        return None

    def _longest_first_step(self, wanted: Allocation) -> float:
        """Return the maximum step duration, in seconds, with which a first split fits the budget.

        `wanted` is the fastest split, whose steps take too long. A split with shorter steps is
        assumed to take as long as `wanted` for its start and warm-up.
        """
        layout = self._predictions.layout(wanted)
        least = self._budget.least_seconds(layout, wanted.seconds, LONE_STEPS)
        overhead = least - LONE_STEPS * wanted.seconds
        return (self._budget.seconds - self._budget.spent - overhead) / LONE_STEPS

    def _next_single(self) -> Allocation | None:
        """Return the device to measure next while the others are idle, at its best batch.

        Of the devices in `_never_measured_with_others_idle`, it is the one with the highest
        predicted samples/s. A single device may beat all splits because its batch is larger, or
        because it runs without contention.

        Return None if the device isn't expected to win, or if the first split hasn't been measured
        yet. There is one exception: if the batch is fixed or there is only one device, a batch that
        may not fit is tried even if it isn't expected to win.
        """
        others = len(self._machine.live) > 1
        if others and self._with_splits and not self._machine.splits:
            return None
        wanted = fastest(map(self._predictions.single, self._never_measured_with_others_idle()))
        if wanted is None:
            return None
        if others:  # for a fixed batch, the best solo layout is always compared
            best = self._best_rate
            unsure = self._problem.global_batch is not None and not self._machine.others_idle
        else:
            rates = [one.samples_per_second for one in self._seen.timed()]
            best = (1 + self._budget.least_gain) * max(rates, default=0.0)
            unsure = True
        if wanted.samples_per_second > best:
            return wanted
        untried = unsure and not self._machine.surely_fits(self._predictions.layout(wanted))
        return wanted if untried else None

    def _never_measured_with_others_idle(self) -> list[int]:
        """Return the positions of devices to measure while the others are idle.

        Devices that can't be distinguished form a group. The result has the devices of all groups
        in which no device was measured while the others were idle. If there is only one device, the
        result has that device until the batch that should be its best has been measured.
        """
        if len(self._machine.live) == 1:
            return [i for i in self._machine.live if self._has_new_best_batch(i)]
        rested = {seen.probe.layout.active[0] for seen in self._seen.in_stage(Stage.REST)}
        groups = (group for group in self._machine.groups if not rested.intersection(group))
        return sorted(i for group in groups for i in group)

    def _has_new_best_batch(self, position: int) -> bool:
        """True if the device's best batch, as predicted, isn't near any batch that was measured."""
        wanted = self._predictions.single(position)
        if wanted is None:
            return False
        batch = wanted.global_batch
        points = self._machine.devices[position].points
        return all(abs(point.batch - batch) > SAME_BATCH * point.batch for point in points)


def _is_like(layout: Layout, seen: Observation) -> bool:
    """True if a measurement of the split would show nothing new after the observation `seen`.

    The split must be equal to the observed layout. If `seen` timed only a single step, it is enough
    that the two are too similar for a measurement to tell them apart.
    """
    if isinstance(seen, Timed) and seen.lone:
        return same_measurement(layout, seen.probe.layout)
    return layout == seen.probe.layout
