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

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from evener.plan.layout import Knots

from ..families import split_evenly
from ..types import End, Failed, Layout, Probe, Stage, Timed, layout_of, solo
from .budget import Budget
from .decisions import explain_too_long
from .layouts import NO_CURVE, RETREATS, same_measurement
from .model.step_time import WIDE
from .observations import MOST_TURNS
from .solo_stage import SMALL
from .text_model import LARGEST_BATCH, TextModel

SHORT, MIDDLE, LONG = 0.2, 0.5, 0.9  # quantiles of the lengths
LONG_ENOUGH = 3.0  # times as long as the first pass: then two thirds of it are what tokens cost
MOST_PASSES = 4  # of the probe that shows what passes cost: three times that cost in one step
# the longest probe of passes of one length: seven of them make a cost, in 14 s of 120
PASS_SECONDS = 2.0


class TextDevices(TextModel):
    """Devices whose time follows from the lengths of their rows."""

    def next_probes(self, budget: Budget, with_splits: bool) -> tuple[Probe, ...]:
        """The next passes of every device alone, else the next global batch on each, else the next
        split.
        """
        passes = {i: self._next_passes(i, budget) for i in self.live}
        probes = self._next_alone(passes, budget)
        if not probes:
            probes = self._next_alone({i: self._next_whole(i) for i in self.able}, budget)
        if not probes and with_splits:
            probes = self._next_split(budget)
        return probes

    def why_none(self) -> End | None:
        """Why no device can train; None if one holds the longest row."""
        return None if self.can_hold(self.live) else explain_too_long(self.problem)

    def is_training(self, layout: Layout) -> bool:
        """A device alone with a few rows is no training."""
        return bool(layout.costs) or (layout.by_rows and layout.traits.together)

    def apart_seconds(self, _layout: Layout) -> float | None:
        """None: what devices take alone for their rows isn't known."""
        return None

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """None, as plans have the costs of rows."""
        return NO_CURVE * len(layout.shares)

    # ------------------------------------------------------------------ candidates

    def singles(self) -> list[Layout]:
        """The global batch on the device that takes the least time for it alone."""
        ran = {}
        for seen in self.seen.timed("solo"):
            if seen.probe.layout.costs:
                ran[seen.probe.layout.active] = seen.probe.layout
        holding = [i for i in self.able if self.can_hold((i,))]
        layouts = [ran.get((i,)) or self.layout((i,), self.batch) for i in holding]
        whole = [layout for layout in layouts if self.seen.broken(layout) is None]
        return sorted(whole, key=self.predicted_rate, reverse=True)[:1]

    def best_splits(self) -> list[Layout]:
        """The last split that exploration measured, and the fastest."""
        ran = self.fitting_splits
        by_rate = sorted(ran, key=lambda one: -one.samples_per_second)
        return list(dict.fromkeys(one.probe.layout for one in (*ran[-1:], *by_rate[:1])))

    def even_splits(self, splits: Sequence[Layout], scaling: bool) -> list[Layout]:
        """The even split of rows, in the data's order, over the best split's devices; passes can
        hold the longest rows.

        A training without a plan does the same.
        """
        if not splits:
            return []
        split = splits[0]
        devices = self.problem.devices
        even = split_evenly(devices, split.active, split.global_batch, self.quantum)
        if even is None:
            return []
        longest = self.problem.lengths[-1]
        rows = []
        for share, wall in zip(even.shares, self.walls, strict=True):
            rows.append(min(share, wall // longest) if wall else share)
        if not all(rows[i] for i in even.active):
            return []
        return [layout_of(even.shares, tuple(rows))]

    # ------------------------------------------------------------------ exploration

    def _next_alone(self, wanted: Mapping[int, Layout | None], budget: Budget) -> tuple[Probe, ...]:
        """A probe of each device alone for which another layout is wanted, if the budget affords
        all of them.
        """
        layouts = {i: layout for i, layout in wanted.items() if layout}
        costs_known = all(self.alone[i] for i in wanted)
        ends_with: Stage = "solo" if costs_known else "race"  # no plan without costs
        if not all(budget.affords(layout, ends_with) for layout in layouts.values()):
            return ()
        turn = 1 + max((len(self.tried_alone(i)) for i in layouts), default=0)
        probes = []
        for layout in layouts.values():
            seconds = budget.probe_seconds(layout, "solo")
            if layout.length:
                seconds = min(seconds, PASS_SECONDS)
            probes.append(Probe(layout, "solo", seconds, turn))
        return tuple(probes)

    # ------------------------------------------------------------------ passes of one length

    def _next_passes(self, position: int, budget: Budget) -> Layout | None:
        """The next passes of rows of one length on a device; None when its cost is known."""
        tried = [seen.probe.layout for seen in self.tried_alone(position)]
        for layout in self._passes(position, budget.time.longest_step()):
            if layout not in tried:
                return layout
        return None

    def _passes(self, position: int, longest_step: float) -> Iterator[Layout]:
        """The passes of rows of one length that make a device's cost, in their order."""
        middle = self._quantile(MIDDLE)
        longest = self.problem.lengths[-1]
        tokens = max(SMALL * middle, longest)
        yield self._same_length(position, middle, tokens)
        tokens *= WIDE
        while self._worth_growing(position, longest, tokens, longest_step):
            yield self._same_length(position, longest, tokens)
            tokens *= WIDE
        largest = max((longest, *self.single_passes(position)))
        short = self._quantile(SHORT)
        yield self._same_length(position, short, max(largest // WIDE, longest), MOST_PASSES)
        for length in (longest, middle, self._quantile(LONG)):
            yield self._same_length(position, length, largest)

    def _same_length(self, position: int, length: int, tokens: int, passes: int = 1) -> Layout:
        """As many rows of one length as these tokens are, in each of some passes, on a device."""
        most = self.problem.global_batch or self.problem.max_global_batch or tokens
        rows = max(1, min(tokens // length, most))
        layout = solo(self.problem.devices, position, rows * passes, rows)
        return msgspec.structs.replace(layout, length=length)

    def _quantile(self, part: float) -> int:
        lengths = self.problem.lengths
        return max(1, lengths[int(part * (len(lengths) - 1))])

    def _worth_growing(self, position: int, length: int, tokens: int, longest_step: float) -> bool:
        """True if larger passes are wanted, as none shows yet what tokens cost, may fit, and are
        ever taken.
        """
        steps = self.single_passes(position).values()
        if not steps or max(steps) >= min(LONG_ENOUGH * min(steps), longest_step / WIDE):
            return False
        most = self.problem.global_batch or self.problem.max_global_batch or LARGEST_BATCH
        wall = self.walls[position]
        return tokens <= most * length and not (wall and tokens > wall)

    # ------------------------------------------------------------------ global batches

    def _next_whole(self, position: int) -> Layout | None:
        """The global batch on one device, again in smaller passes if it ran out of memory."""
        tried = [one for one in self.tried_alone(position) if one.probe.layout.costs]
        ended = len(tried) > RETREATS or any(isinstance(one, Timed | Failed) for one in tried)
        if ended or not self.can_hold((position,)):
            return None
        layout = self.layout((position,), self.batch)
        return layout if all(one.probe.layout.tokens != layout.tokens for one in tried) else None

    def _next_split(self, budget: Budget) -> tuple[Probe, ...]:
        """The split that the costs predict to be fastest, if it isn't much like one before."""
        tried = [one.probe.layout for one in self.seen.in_stage("split") if one.probe.layout.costs]
        layout = self.best_split if len(tried) < MOST_TURNS else None
        if layout is None:
            return ()
        for one in tried:
            if one.tokens == layout.tokens and same_measurement(one, layout):
                return ()
        if not budget.affords(layout, "split" if self.splits else "race"):
            return ()
        seconds = budget.probe_seconds(layout, "split")
        return (Probe(layout, "split", seconds, len(tried)),)
