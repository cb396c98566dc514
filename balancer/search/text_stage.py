"""Exploration where rows are of unequal length: passes of a few sizes, then whole batches, split
and alone.

A small pass, larger ones of the longest rows until they take clearly longer, then several passes of
short rows, and passes of other lengths, give each device's cost; all devices run at the same time.
A small pass tells nothing of tokens on a fast GPU: starting its kernels takes longer than computing
them. Then the global batch is measured on each device alone, which tests its cost, and the split
that the costs predict. More splits follow while what the devices' own work in the last one showed
assigns rows otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ..types import Failed, Layout, Probe, Stage, Timed, solo
from .budget import Budget
from .layouts import RETREATS, same_measurement
from .model.step_time import WIDE
from .observations import MOST_TURNS
from .solo_stage import SMALL
from .text_model import LARGEST_BATCH, TextModel

SHORT, MIDDLE, LONG = 0.2, 0.5, 0.9  # quantiles of the lengths
LONG_ENOUGH = 3.0  # times as long as the first pass: then two thirds of it are what tokens cost
MOST_PASSES = 4  # of the probe that shows what passes cost: three times that cost in one step
# the longest probe of passes of one length: seven of them make a cost, in 14 s of 120
PASS_SECONDS = 2.0


class TextStage:
    """The stage that chooses passes, then batches and splits, by what rows were seen to cost."""

    def __init__(self, machine: TextModel, budget: Budget, splits: bool) -> None:
        self._machine = machine
        self._budget = budget
        self._with_splits = splits
        self._problem = machine.problem

    def next_probes(self) -> tuple[Probe, ...]:
        """The next passes of every device alone, else the next global batch on each, else the next
        split.
        """
        passes = {i: self._next_passes(i) for i in self._machine.live}
        probes = self._next_alone(passes)
        if not probes:
            probes = self._next_alone({i: self._next_whole(i) for i in self._machine.able})
        if not probes and self._with_splits:
            probes = self._next_split()
        return probes

    def _next_alone(self, wanted: Mapping[int, Layout | None]) -> tuple[Probe, ...]:
        """A probe of each device alone for which another layout is wanted, if the budget affords
        all of them.
        """
        layouts = {i: layout for i, layout in wanted.items() if layout}
        costs_known = all(self._machine.alone[i] for i in wanted)
        ends_with: Stage = "solo" if costs_known else "race"  # no plan without costs
        if not all(self._budget.affords(layout, ends_with) for layout in layouts.values()):
            return ()
        turn = 1 + max((len(self._machine.tried_alone(i)) for i in layouts), default=0)
        probes = []
        for layout in layouts.values():
            seconds = self._budget.probe_seconds(layout, "solo")
            if layout.length:
                seconds = min(seconds, PASS_SECONDS)
            probes.append(Probe(layout, "solo", seconds, turn))
        return tuple(probes)

    # ------------------------------------------------------------------ passes of one length

    def _next_passes(self, position: int) -> Layout | None:
        """The next passes of rows of one length on a device; None when its cost is known."""
        tried = [seen.probe.layout for seen in self._machine.tried_alone(position)]
        for layout in self._passes(position):
            if layout not in tried:
                return layout
        return None

    def _passes(self, position: int) -> Iterator[Layout]:
        """The passes of rows of one length that make a device's cost, in their order."""
        middle = self._quantile(MIDDLE)
        longest = self._problem.lengths[-1]
        tokens = max(SMALL * middle, longest)
        yield self._same_length(position, middle, tokens)
        tokens *= WIDE
        while self._worth_growing(position, longest, tokens):
            yield self._same_length(position, longest, tokens)
            tokens *= WIDE
        largest = max((longest, *self._machine.single_passes(position)))
        short = self._quantile(SHORT)
        yield self._same_length(position, short, max(largest // WIDE, longest), MOST_PASSES)
        for length in (longest, middle, self._quantile(LONG)):
            yield self._same_length(position, length, largest)

    def _same_length(self, position: int, length: int, tokens: int, passes: int = 1) -> Layout:
        """As many rows of one length as these tokens are, in each of some passes, on a device."""
        most = self._problem.global_batch or self._problem.max_global_batch or tokens
        rows = max(1, min(tokens // length, most))
        layout = solo(self._problem.devices, position, rows * passes, rows)
        return msgspec.structs.replace(layout, length=length)

    def _quantile(self, part: float) -> int:
        lengths = self._problem.lengths
        return max(1, lengths[int(part * (len(lengths) - 1))])

    def _worth_growing(self, position: int, length: int, tokens: int) -> bool:
        """True if larger passes are wanted, as none shows yet what tokens cost, may fit, and are
        ever taken.
        """
        steps = self._machine.single_passes(position).values()
        if not steps:
            return False
        longest_step = self._budget.time.longest_step()
        if max(steps) >= min(LONG_ENOUGH * min(steps), longest_step / WIDE):
            return False
        most = self._problem.global_batch or self._problem.max_global_batch or LARGEST_BATCH
        wall = self._machine.walls[position]
        return tokens <= most * length and not (wall and tokens > wall)

    # ------------------------------------------------------------------ global batches

    def _next_whole(self, position: int) -> Layout | None:
        """The global batch on one device, again in smaller passes if it ran out of memory."""
        tried = [one for one in self._machine.tried_alone(position) if one.probe.layout.costs]
        ended = len(tried) > RETREATS or any(isinstance(one, Timed | Failed) for one in tried)
        if ended or not self._machine.can_hold((position,)):
            return None
        layout = self._machine.layout((position,), self._machine.batch)
        return layout if all(one.probe.layout.tokens != layout.tokens for one in tried) else None

    def _next_split(self) -> tuple[Probe, ...]:
        """The split that the costs predict to be fastest, if it isn't much like one before."""
        tried = [
            one.probe.layout
            for one in self._machine.seen.in_stage("split")
            if one.probe.layout.costs
        ]
        layout = self._machine.best_split if len(tried) < MOST_TURNS else None
        if layout is None:
            return ()
        for one in tried:
            if one.tokens == layout.tokens and same_measurement(one, layout):
                return ()
        if not self._budget.affords(layout, "split" if self._machine.splits else "race"):
            return ()
        seconds = self._budget.probe_seconds(layout, "split")
        return (Probe(layout, "split", seconds, len(tried)),)
