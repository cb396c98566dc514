"""The second stage: the real synchronous step, a few times, each predicted with what the last one
showed.

The first split is the fastest that the solo curves predict. Its step gives the cost of gradient
exchange and, where the devices' own times are reported, one more point of every curve. The stage
ends when the prediction was tried, or promises no more than 0.2 % over what ran. One device alone,
while the others are idle, is measured if it may beat every split. Of a fixed batch the fastest
device alone comes before the first split if two steps of it take little of what is left: it is
compared in any case, and starts no children.
"""

from __future__ import annotations

from functools import cached_property

from evener.shares.waterfill import Allocation

from ..statistics import LONE_BLOCK
from ..types import Failed, Layout, Probe, Stage
from .budget import SHORTEST_PROBE_SECONDS, Budget
from .observations import MOST_TURNS, TRIES
from .predictions import Predictions, fastest
from .ranking import LEAST_RATE

LONE_STEPS = 2  # of a probe of a lone step: the first isn't timed (huge_steps; dear sync in 20 s)


class SplitStage:
    """The stage that chooses splits to measure, and a device to measure while the others are
    idle.
    """

    def __init__(self, model: Predictions, budget: Budget, splits: bool) -> None:
        self._model, self._budget = model, budget
        self._seen, self._problem, self._with_splits = self._model.seen, self._model.problem, splits

    def next_probe(self) -> Probe | None:
        """The next split, or one device with the others idle; None when the stage is over."""
        if len(self._seen.in_stage("split", "rest")) >= MOST_TURNS:
            return None
        split = self._model.fastest_split
        after = (
            self._budget.least_seconds(self._model.layout(split), split.seconds) if split else 0.0
        )
        return self._probe(self._first_single(after), after) or self._probe(
            (self._next_split() if self._with_splits else None) or self._next_single()
        )

    def _probe(self, wanted: Allocation | None, after: float = 0.0) -> Probe | None:
        """Its probe; None for none, or one that leaves less of the budget than what comes after it
        takes.
        """
        if wanted is None:
            return None
        layout, seconds = self._model.layout(wanted), wanted.seconds
        stage: Stage = "split" if layout.traits.together else "rest"
        if not self._model.splits and not self._model.at_rest:
            layout, seconds = self._without_risk(layout, seconds)
        ends_with: Stage = stage if self._model.splits else "race"
        least = self._budget.least_seconds(layout, seconds)
        if self._budget.affords(layout, ends_with, seconds, reserved=after) and (
            not after or self._budget.has_time(least, after)
        ):
            return Probe(
                layout, stage, self._budget.probe_seconds(layout, stage, step_seconds=seconds)
            )
        lone = self._budget.affords(layout, "race", seconds, reserved=after, steps=LONE_STEPS)
        if (
            lone and wanted.samples_per_second > (1 + LONE_BLOCK) * self._best_rate
        ):  # by more than a lone step errs
            return Probe(layout, stage, min(SHORTEST_PROBE_SECONDS, round(seconds / 2, 3)))
        return None

    @cached_property
    def _best_rate(self) -> float:
        """The most samples/s of the plans that ran: of splits as predicted since, of devices at
        rest as measured.
        """
        splits = (
            self._model.predicted_rate(one.probe.layout) for one in self._model.fitting_splits
        )
        return max(
            (*splits, *(one.samples_per_second for one in self._model.at_rest.values())),
            default=0.0,
        )

    def _without_risk(self, layout: Layout, seconds: float) -> tuple[Layout, float]:
        """The first plan; in passes that ran before, if a device ran out of memory and there is no
        time for another.
        """
        least = self._budget.least_seconds(layout, seconds)
        full = any(self._model.devices[i].memory.failures for i in layout.active)
        safe = self._model.lay_out_safely(layout.shares) if full else None
        if safe is None or self._budget.affords(layout, "race", seconds, reserved=least):
            return layout, seconds
        return safe, layout.global_batch / max(self._model.predicted_rate(safe), LEAST_RATE)

    def _next_split(self) -> Allocation | None:
        """The allocation that is worth a split probe; None when nothing is."""
        tried = self._seen.in_stage("split")
        failed = sum(1 for seen in tried if isinstance(seen, Failed))
        wanted = self._model.fastest_split
        if wanted is None or failed >= TRIES or not self._gains(wanted):
            return None  # a network that fails takes minutes each time
        layout = self._model.layout(wanted)
        return (
            wanted
            if layout.traits.together and all(layout != seen.probe.layout for seen in tried)
            else None
        )

    def _gains(self, wanted: Allocation) -> bool:
        """Whether it is predicted to beat all measured splits and one device alone by a measurable
        gain.
        """
        if not self._model.fitting_splits:
            return True
        raced = [self._seen.turns(seen.probe.layout) for seen in self._seen.timed_race()]
        rates = [one.samples_per_second for turns in raced for one in turns.values()]
        best = max(self._best_rate, self._model.best_single_rate, *rates)
        return wanted.samples_per_second > best * (1 + self._budget.least_gain)

    def _first_single(self, after: float) -> Allocation | None:
        """The fastest device alone at a fixed batch: a split that is much slower mustn't be all
        that was measured.
        """
        tried = self._model.splits or self._seen.in_stage("rest")
        if (
            self._problem.global_batch is None
            or len(self._model.live) < 2
            or not self._with_splits
            or tried
        ):
            return None
        single, split = self._model.fastest_single, self._model.fastest_split
        if single is None or split is None:
            return single
        seconds = self._budget.least_seconds(self._model.layout(single), single.seconds, LONE_STEPS)
        return (
            single if self._budget.has_time(seconds, after) else None
        )  # and, in `_probe`, for the split after it

    def _next_single(self) -> Allocation | None:
        """One device alone while the others are idle, if it may win by a larger batch or without
        contention.
        """
        others = len(self._model.live) > 1
        if others and self._with_splits and not self._model.splits:
            return None
        rested = [seen.probe.layout.active[0] for seen in self._seen.in_stage("rest")]
        fresh = sorted(
            i for group in self._model.groups if not set(group).intersection(rested) for i in group
        )
        wanted = fastest(map(self._model.single, fresh))
        if wanted is None:
            return None
        if others:  # of a fixed batch the best single device is always compared
            best, unsure = (
                self._best_rate,
                self._problem.global_batch is not None and not self._model.at_rest,
            )
        else:
            rates = [one.samples_per_second for one in self._seen.timed()]
            best, unsure = (1 + self._budget.least_gain) * max(rates, default=0.0), True
        untried = unsure and not self._model.surely_hold(self._model.layout(wanted))
        return wanted if wanted.samples_per_second > best or untried else None
