"""Measure devices and splits for rows of unequal length: single passes first, then whole batches.

The cost of rows on a device is determined by four kinds of passes:

- a small pass
- larger passes of the longest rows, until they take clearly longer
- several passes of short rows in one step
- passes of other lengths

All devices run at the same time. A small pass says nothing about the cost of tokens on a fast GPU,
where launching kernels takes longer than computing them. The larger passes show it.

To test the costs, the global batch is then measured on each single device, and in the layout over
several devices that should be the fastest according to the costs. More such layouts follow as
long as the compute times of the last one lead to a different assignment of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ..types import Failed, Layout, Probe, Stage, Timed, solo
from .budget import Budget
from .layouts import RETREATS, same_measurement
from .model.step_time import WIDE_GAP
from .observations import MOST_TURNS
from .solo_stage import SMALL
from .text_model import LARGEST_BATCH, TextModel

SHORT, MIDDLE, LONG = 0.2, 0.5, 0.9  # quantiles of the lengths
LONG_ENOUGH = 3.0  # ratio to the first pass's time: two thirds of it are then the cost of tokens
MOST_PASSES = 4  # passes per step of the probe that shows the cost of passes
# maximum duration of a probe of passes of one length: seven such probes determine a device's cost,
# which takes 14 s of a budget of 120 s
PASS_SECONDS = 2.0


class TextStage:
    """Chooses what to measure to find out how the cost of a row depends on its length.

    The first probes run passes in which all rows have the same length. Later probes run real
    batches, whose rows are assigned to devices by this cost.
    """

    def __init__(self, machine: TextModel, budget: Budget, with_splits: bool) -> None:
        self._machine = machine
        self._budget = budget
        self._with_splits = with_splits
        self._problem = machine.problem

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the next probes; empty if no further measurement is worth its time."""
        passes = {i: self._next_passes(i) for i in self._machine.live}
        probes = self._probe_alone(passes)
        if not probes:
            probes = self._probe_alone(
                {i: self._next_global_batch(i) for i in self._machine.devices_with_cost}
            )
        if not probes and self._with_splits:
            probes = self._next_split()
        return probes

    def _probe_alone(self, layout_by_device: Mapping[int, Layout | None]) -> tuple[Probe, ...]:
        """Return a probe of each layout on its device; empty if there isn't time for all of them.

        The keys are device positions. None means that the device has nothing to measure.
        """
        layouts = {i: layout for i, layout in layout_by_device.items() if layout}
        costs_known = all(self._machine.costs_alone[i] for i in layout_by_device)
        ends_with: Stage = Stage.SOLO if costs_known else Stage.RACE  # no plan without costs
        if not all(self._budget.affords(layout, ends_with) for layout in layouts.values()):
            return ()
        turn = 1 + max((len(self._machine.tried_alone(i)) for i in layouts), default=0)
        probes = []
        for layout in layouts.values():
            seconds = self._budget.probe_seconds(layout, Stage.SOLO)
            if layout.length:
                seconds = min(seconds, PASS_SECONDS)
            probes.append(Probe(layout, Stage.SOLO, seconds, turn))
        return tuple(probes)

    # ------------------------------------------------------------------ passes of one length

    def _next_passes(self, position: int) -> Layout | None:
        """Return the next layout to measure on a device, with rows of one length.

        None if all of them were measured.
        """
        tried = [seen.probe.layout for seen in self._machine.tried_alone(position)]
        for layout in self._list_passes_to_measure(position):
            if layout not in tried:
                return layout
        return None

    def _list_passes_to_measure(self, position: int) -> Iterator[Layout]:
        """Yield the layouts on one device whose step times show what rows cost on it.

        The rows of each layout have a single length. Layouts differ in this length, and in the
        numbers of rows and passes.
        """
        middle = self._quantile(MIDDLE)
        longest = self._problem.lengths[-1]
        tokens = max(SMALL * middle, longest)
        yield self._equal_rows(position, middle, tokens)
        tokens *= WIDE_GAP
        # passes grow until they show the cost of tokens
        while self._worth_growing(position, longest, tokens):
            yield self._equal_rows(position, longest, tokens)
            tokens *= WIDE_GAP
        largest = max((longest, *self._machine.single_passes(position)))
        short = self._quantile(SHORT)
        yield self._equal_rows(position, short, max(largest // WIDE_GAP, longest), MOST_PASSES)
        for length in (longest, middle, self._quantile(LONG)):
            yield self._equal_rows(position, length, largest)

    def _equal_rows(self, position: int, length: int, tokens: int, passes: int = 1) -> Layout:
        """Return a layout with rows of one length, and about `tokens` tokens in each pass."""
        most = self._problem.global_batch or self._problem.max_global_batch or tokens
        rows = max(1, min(tokens // length, most))
        layout = solo(self._problem.devices, position, rows * passes, rows)
        return msgspec.structs.replace(layout, length=length)

    def _quantile(self, part: float) -> int:
        lengths = self._problem.lengths
        return max(1, lengths[int(part * (len(lengths) - 1))])

    def _worth_growing(self, position: int, length: int, tokens: int) -> bool:
        """Whether a pass of more tokens should be measured to find out the cost of a token.

        It should if all passes so far took about the same time, and if the larger one may fit in
        memory and in the remaining time.
        """
        steps = self._machine.single_passes(position).values()
        if not steps:
            return False
        longest_step = self._budget.time.longest_step()
        # the cost of tokens is known, or the pass would take too long
        if max(steps) >= min(LONG_ENOUGH * min(steps), longest_step / WIDE_GAP):
            return False
        most = self._problem.global_batch or self._problem.max_global_batch or LARGEST_BATCH
        limit = self._machine.token_limits[position]
        # it may fit, and a training may use it
        return tokens <= most * length and not (limit and tokens > limit)

    # ------------------------------------------------------------------ global batches

    def _next_global_batch(self, position: int) -> Layout | None:
        """Return the layout with the whole global batch on one device, or None.

        If it ran out of memory before, its passes are smaller now. None if it ran, if it failed for
        another reason or too often, or if the device can't hold the longest row.
        """
        tried = [one for one in self._machine.tried_alone(position) if one.probe.layout.costs]
        ended = len(tried) > RETREATS or any(isinstance(one, Timed | Failed) for one in tried)
        if ended or not self._machine.can_hold((position,)):
            return None
        layout = self._machine.layout((position,), self._machine.batch)
        return layout if all(one.probe.layout.tokens != layout.tokens for one in tried) else None

    def _next_split(self) -> tuple[Probe, ...]:
        """Return a probe of the best layout over several devices, as a tuple of one.

        Empty if the layout was measured already, or if there is no time.
        """
        tried = [
            one.probe.layout
            for one in self._machine.seen.in_stage(Stage.SPLIT)
            if one.probe.layout.costs
        ]
        layout = self._machine.best_split if len(tried) < MOST_TURNS else None
        if layout is None:
            return ()
        for one in tried:
            if one.tokens == layout.tokens and same_measurement(one, layout):
                return ()
        if not self._budget.affords(layout, Stage.SPLIT if self._machine.splits else Stage.RACE):
            return ()
        seconds = self._budget.probe_seconds(layout, Stage.SPLIT)
        return (Probe(layout, Stage.SPLIT, seconds, len(tried)),)
