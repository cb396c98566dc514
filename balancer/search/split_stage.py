"""The second stage of a search: measure steps over several devices.

Such a step, or its layout, is a split. The first one divides the rows in the way that is fastest
according to the measurements of single devices. It shows how long gradient exchange takes. If the
devices' compute times are reported, it also shows how fast each device is while the others compute
too. From this, the next split is predicted and measured. The stage ends when the predicted split
was measured already, or promises at most 0.2 % more samples/s than the layouts that ran.

In the first stage, all devices run at once and so slow each other down. A single device that may be
faster than every split is therefore measured again while the others are idle. If a global batch was
requested, the fastest device may be measured in this way even before the first split, provided that
its probe takes little of the remaining time, or that the device is predicted to beat the split. The
time isn't wasted: each split is later compared with this device, and no new process has to start.
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
from .time_left import SHORTEST_PROBE_SECONDS, STEPS_TO_TIME_ONE


class SplitStage:
    """Chooses which splits to measure, and which devices to measure while the others are idle.

    A split is a step over several devices.
    """

    def __init__(self, predictions: Predictions, budget: Budget, with_splits: bool) -> None:
        self._predictions = predictions
        self._machine = predictions.machine
        self._budget = budget
        self._with_splits = with_splits
        self._seen = self._machine.seen
        self._problem = predictions.problem

    def next_probe(self) -> Probe | None:
        """Return the next probe; None when the stage is over or out of time."""
        if len(self._seen.in_stage(Stage.SPLIT, Stage.REST)) >= MOST_TURNS:
            return None
        first = self._probe_first_single()
        if first:
            return first
        wanted = self._next_split() if self._with_splits else None
        found = self._make_probe(wanted or self._next_single())
        if found or wanted is None or self._machine.splits:
            return found
        return self._make_probe(
            self._predictions.split_within(self._longest_measurable_step(wanted))
        )

    def _least_seconds(self, allocation: Allocation) -> float:
        return self._budget.least_seconds(self._predictions.layout(allocation), allocation.seconds)

    def _make_probe(self, allocation: Allocation | None, reserved: float = 0.0) -> Probe | None:
        """Return a probe of an allocation of rows, or None if there is no time for it.

        `reserved` is how many seconds must remain for later probes.
        """
        if allocation is None:
            return None
        layout = self._predictions.layout(allocation)
        seconds = allocation.seconds
        stage: Stage = Stage.SPLIT if layout.traits.together else Stage.REST
        if not self._machine.splits and not self._machine.others_idle:
            layout, seconds = self._use_passes_that_ran(layout, seconds)
        ends_with: Stage = stage if self._machine.splits else Stage.RACE
        least = self._budget.least_seconds(layout, seconds)
        affordable = self._budget.affords(layout, ends_with, seconds, reserved=reserved)
        if affordable and (not reserved or self._budget.has_time(least, reserved)):
            most = self._budget.probe_seconds(layout, stage, step_seconds=seconds)
            return Probe(layout, stage, most)
        single_step = self._budget.affords(
            layout, Stage.RACE, seconds, reserved=reserved, steps=STEPS_TO_TIME_ONE
        )
        # there is only time for a single step
        if single_step and allocation.samples_per_second > self._best_rate:
            return Probe(layout, stage, min(SHORTEST_PROBE_SECONDS, round(seconds / 2, 3)))
        return None

    @cached_property
    def _best_rate(self) -> float:
        """The throughput, in samples/s, that a new layout has to beat.

        This is the highest value predicted for a measured split, or measured on a single device
        while the others were idle.
        """
        # as predicted now
        splits = [
            self._machine.predicted_rate(split.probe.layout)
            for split in self._machine.fitting_splits
        ]
        # as measured
        others_idle = [one.samples_per_second for one in self._machine.others_idle.values()]
        return max((*splits, *others_idle), default=0.0)

    def _use_passes_that_ran(self, layout: Layout, seconds: float) -> tuple[Layout, float]:
        """Return `layout` or one with smaller passes, and its expected step time in seconds.

        Smaller passes, which are sure to fit, are used if a device ran out of memory before, and if
        there is no time for a second attempt. `seconds` is the expected step time of `layout`.
        """
        least = self._budget.least_seconds(layout, seconds)
        full = any(self._machine.devices[i].memory.failure_count for i in layout.active)
        safe = self._machine.lay_out_safely(layout.shares) if full else None
        if safe is None or self._budget.affords(layout, Stage.RACE, seconds, reserved=least):
            return layout, seconds
        return safe, layout.global_batch / max(self._machine.predicted_rate(safe), LEAST_RATE)

    def _next_split(self) -> Allocation | None:
        """Return the split that is predicted to be the fastest.

        None if it was tried already, or isn't clearly faster than what ran.
        """
        tried = self._seen.in_stage(Stage.SPLIT)
        failed = sum(isinstance(seen, Failed) for seen in tried)
        if failed >= TRIES:  # a network that fails takes minutes each time
            return None
        wanted = self._predictions.fastest_split
        if wanted is None or not self._is_clearly_faster(wanted):
            return None
        layout = self._predictions.layout(wanted)
        if not layout.traits.together or any(_is_indistinguishable(layout, seen) for seen in tried):
            return None
        return wanted

    def _is_clearly_faster(self, allocation: Allocation) -> bool:
        """Whether an allocation is predicted to be clearly faster than everything that ran."""
        if not self._machine.fitting_splits:
            return True
        raced = [self._seen.turns(seen.probe.layout) for seen in self._seen.timed_race()]
        rates = [turn.samples_per_second for turns in raced for turn in turns.values()]
        best = max(self._best_rate, self._predictions.best_single_rate, *rates)
        return allocation.samples_per_second > best * (1 + self._budget.least_gain)

    def _probe_first_single(self) -> Probe | None:
        """Return the probe of the fastest single device that runs before the first split, or None.

        None if no global batch was requested. Without this probe, a short search might only measure
        a split, even if a single device is faster.
        """
        if self._problem.global_batch is None or not self._with_splits:
            return None
        if len(self._machine.live) < 2 or self._machine.splits or self._seen.in_stage(Stage.REST):
            return None
        single = self._predictions.fastest_single
        split = self._predictions.fastest_split
        if single is None or split is None:
            return self._make_probe(single)
        reserved = self._least_seconds(split)
        layout = self._predictions.layout(single)
        seconds = self._budget.least_seconds(layout, single.seconds, STEPS_TO_TIME_ONE)
        # there is also time for the split
        if self._budget.has_time(seconds, reserved):
            return self._make_probe(single, reserved)
        if single.samples_per_second > split.samples_per_second:
            return self._make_probe(single)
        return None

    def _longest_measurable_step(self, fastest_split: Allocation) -> float:
        """Return the longest step time, in seconds, that can be measured in the remaining budget.

        Used if the steps of `fastest_split` take too long to be measured. The first split is then
        chosen among those with shorter steps.
        """
        layout = self._predictions.layout(fastest_split)
        least = self._budget.least_seconds(layout, fastest_split.seconds, STEPS_TO_TIME_ONE)
        # assumed to be the same for a split with shorter steps
        overhead = least - STEPS_TO_TIME_ONE * fastest_split.seconds
        return (self._budget.seconds - self._budget.spent - overhead) / STEPS_TO_TIME_ONE

    def _next_single(self) -> Allocation | None:
        """Return the next device to measure while the others are idle, with its batch, or None."""
        others = len(self._machine.live) > 1
        if others and self._with_splits and not self._machine.splits:
            return None
        # a single device may win by its larger batch, or without contention
        wanted = fastest(map(self._predictions.single, self._never_measured_with_others_idle()))
        if wanted is None:
            return None
        if others:  # for a fixed batch, the best solo layout is always compared
            best = self._best_rate
            unsure = self._problem.global_batch is not None and not self._machine.others_idle
        else:
            rates = [timed.samples_per_second for timed in self._seen.timed()]
            best = (1 + self._budget.least_gain) * max(rates, default=0.0)
            unsure = True
        if wanted.samples_per_second > best:
            return wanted
        # a batch that may not fit is tried even if it isn't expected to win
        untried = unsure and not self._machine.is_sure_to_fit(self._predictions.layout(wanted))
        return wanted if untried else None

    def _never_measured_with_others_idle(self) -> list[int]:
        """Return the devices that were never measured while the others were idle.

        A device is left out if an equally fast one was measured in this way. If only one device is
        usable, it is listed as long as its best batch hasn't been measured.
        """
        if len(self._machine.live) == 1:
            return [i for i in self._machine.live if self._has_new_best_batch(i)]
        rested = {seen.probe.layout.active[0] for seen in self._seen.in_stage(Stage.REST)}
        # devices in a group can't be distinguished, so one measurement is enough
        groups = (group for group in self._machine.groups if not rested.intersection(group))
        return sorted(i for group in groups for i in group)

    def _has_new_best_batch(self, position: int) -> bool:
        """Whether the batch that should be fastest on the device hasn't been measured yet."""
        wanted = self._predictions.single(position)
        if wanted is None:
            return False
        batch = wanted.global_batch
        points = self._machine.devices[position].points
        return all(abs(point.batch - batch) > SAME_BATCH * point.batch for point in points)


def _is_indistinguishable(layout: Layout, observation: Observation) -> bool:
    """Whether an observed split is this layout, or too similar to be worth another measurement."""
    if isinstance(observation, Timed) and observation.is_single_step:
        # after a single step, similar splits aren't measured either
        return same_measurement(layout, observation.probe.layout)
    return layout == observation.probe.layout
