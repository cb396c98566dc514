"""The second stage of a search: measures steps over several devices.

The first such step ("split") divides the rows in the way that is fastest according to the solo
measurements. It shows how long gradient exchange takes. If the devices' compute times are reported,
it also shows how fast each device is while the others compute too. From this, the next split is
predicted and measured. The stage ends when the predicted split was already measured, or promises at
most 0.2 % more samples/s than the layouts that ran.

Solo measurements run on all devices at once, and so slow each other down. A device that may be
faster alone than every split is therefore measured again while the others are idle. With a
requested global batch, this may happen before the first split, with the fastest device. Its probe
must then take little of the remaining time, or the device must be predicted to beat the split. It
isn't wasted: each split is later compared with it, and no new process has to start.
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
    """Measures steps over several devices, and single devices while the others are idle."""

    def __init__(self, predictions: Predictions, budget: Budget, splits: bool) -> None:
        self._predictions = predictions
        self._machine = predictions.machine
        self._budget = budget
        self._with_splits = splits
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
        return self._make_probe(self._predictions.split_within(self._longest_first_step(wanted)))

    def _least_seconds(self, wanted: Allocation) -> float:
        return self._budget.least_seconds(self._predictions.layout(wanted), wanted.seconds)

    def _make_probe(self, wanted: Allocation | None, after: float = 0.0) -> Probe | None:
        """Return a probe of these rows per device, or None if there is no time for it.

        `after` is how many seconds must remain for later probes.
        """
        # the probe must leave `after` seconds for later probes
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
        # there is only time for a single step
        if lone and wanted.samples_per_second > self._best_rate:
            return Probe(layout, stage, min(SHORTEST_PROBE_SECONDS, round(seconds / 2, 3)))
        return None

    @cached_property
    def _best_rate(self) -> float:
        """The samples/s that another layout has to beat: the best predicted or measured so far."""
        # as predicted now
        splits = [
            self._machine.predicted_rate(split.probe.layout)
            for split in self._machine.fitting_splits
        ]
        # as measured
        others_idle = [one.samples_per_second for one in self._machine.others_idle.values()]
        return max((*splits, *others_idle), default=0.0)

    def _use_passes_that_ran(self, layout: Layout, seconds: float) -> tuple[Layout, float]:
        """Return the layout with smaller passes if running out of memory would cost too much.

        This is the case if a device ran out before and there is no time for a second attempt. The
        second value is the expected step time in seconds.
        """
        least = self._budget.least_seconds(layout, seconds)
        full = any(self._machine.devices[i].memory.failure_count for i in layout.active)
        safe = self._machine.lay_out_safely(layout.shares) if full else None
        # or if there is time for a second attempt after running out of memory
        if safe is None or self._budget.affords(layout, Stage.RACE, seconds, reserved=least):
            return layout, seconds
        return safe, layout.global_batch / max(self._machine.predicted_rate(safe), LEAST_RATE)

    def _next_split(self) -> Allocation | None:
        """Return the fastest predicted split; None if it was tried or isn't clearly faster."""
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
        """Whether a split is predicted to be clearly faster than everything that ran."""
        if not self._machine.fitting_splits:
            return True
        raced = [self._seen.turns(seen.probe.layout) for seen in self._seen.timed_race()]
        rates = [turn.samples_per_second for turns in raced for turn in turns.values()]
        best = max(self._best_rate, self._predictions.best_single_rate, *rates)
        return wanted.samples_per_second > best * (1 + self._budget.least_gain)

    def _probe_first_single(self) -> Probe | None:
        """Return a probe of the fastest single device to run before the first split, or None.

        Used for a requested global batch, where a short search could otherwise end with a split
        that is slower than one device.
        """
        # for a fixed batch: a short search could end with only a split, which may be much slower
        if self._problem.global_batch is None or not self._with_splits:
            return None
        if len(self._machine.live) < 2 or self._machine.splits or self._seen.in_stage(Stage.REST):
            return None
        single = self._predictions.fastest_single
        split = self._predictions.fastest_split
        if single is None or split is None:
            return self._make_probe(single)
        after = self._least_seconds(split)
        layout = self._predictions.layout(single)
        seconds = self._budget.least_seconds(layout, single.seconds, LONE_STEPS)
        # there is also time for the split
        if self._budget.has_time(seconds, after):
            return self._make_probe(single, after)
        if single.samples_per_second > split.samples_per_second:
            return self._make_probe(single)
        return None

    def _longest_first_step(self, wanted: Allocation) -> float:
        """Return the longest step, in seconds, that still fits into the remaining time.

        It limits the first split if the fastest one takes too long to measure.
        """
        # `wanted` is the fastest split, whose steps take too long
        layout = self._predictions.layout(wanted)
        least = self._budget.least_seconds(layout, wanted.seconds, LONE_STEPS)
        # assumed to be the same for a split with shorter steps
        overhead = least - LONE_STEPS * wanted.seconds
        return (self._budget.seconds - self._budget.spent - overhead) / LONE_STEPS

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
        untried = unsure and not self._machine.surely_fits(self._predictions.layout(wanted))
        return wanted if untried else None

    def _never_measured_with_others_idle(self) -> list[int]:
        """Return the devices that were only measured while others were busy.

        A device isn't listed if an equally fast one was measured alone.
        """
        if len(self._machine.live) == 1:
            return [i for i in self._machine.live if self._has_new_best_batch(i)]
        rested = {seen.probe.layout.active[0] for seen in self._seen.in_stage(Stage.REST)}
        # devices in a group can't be distinguished, so one measurement is enough
        groups = (group for group in self._machine.groups if not rested.intersection(group))
        return sorted(i for group in groups for i in group)

    def _has_new_best_batch(self, position: int) -> bool:
        """Whether the batch at which the device should be fastest hasn't been measured."""
        wanted = self._predictions.single(position)
        if wanted is None:
            return False
        batch = wanted.global_batch
        points = self._machine.devices[position].points
        return all(abs(point.batch - batch) > SAME_BATCH * point.batch for point in points)


def _is_like(layout: Layout, seen: Observation) -> bool:
    """Whether a measured split is the same as this layout, or too similar to measure both."""
    if isinstance(seen, Timed) and seen.lone:
        # after a single step, similar splits aren't measured either
        return same_measurement(layout, seen.probe.layout)
    return layout == seen.probe.layout
