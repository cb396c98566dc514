"""Exploration where rows are of unequal length: passes of a few sizes, then whole batches, split and alone.

A small pass, larger ones of the longest rows until they take clearly longer, then several passes of short rows, and
passes of other lengths, give each device's cost; all devices run at the same time. A small pass tells nothing of tokens
on a fast GPU: starting its kernels takes longer than computing them. Then the global batch is measured on each device
alone, which tests its cost, and the split that the costs predict. More splits follow while what the devices' own work
in the last one showed assigns rows otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from evener.plan.layout import Knots

from ..families import split_evenly
from ..types import Failed, Layout, Probe, Stage, Timed, layout_of, solo
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
PASS_SECONDS = 2.0  # the longest probe of passes of one length: seven of them make a cost, in 14 s of 120


class TextDevices(TextModel):
    """Devices whose time follows from the lengths of their rows."""

    def next_probes(self, budget: Budget, with_splits: bool) -> tuple[Probe, ...]:
        """The next passes of every device alone, else the next global batch on each, else the next split."""
        return TextStage(self, budget, with_splits).next_probes()

    def why_none(self) -> str:
        """Why no device can train; empty if one holds the longest row."""
        return "" if self.can_hold(self.live) else explain_too_long(self.problem)

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
        ran = {one.probe.layout.active: one.probe.layout for one in self.seen.timed("solo") if one.probe.layout.costs}
        layouts = [ran.get((i,)) or self.layout((i,), self.batch) for i in self.able if self.can_hold((i,))]
        whole = [layout for layout in layouts if self.seen.broken(layout) is None]
        return sorted(whole, key=self.predicted_rate, reverse=True)[:1]

    def best_splits(self) -> list[Layout]:
        """The last split that exploration measured, and the fastest."""
        ran = self.fitting_splits
        if not ran:
            return []
        fastest = max(ran, key=lambda one: one.samples_per_second)
        return list(dict.fromkeys([ran[-1].probe.layout, fastest.probe.layout]))

    def even_splits(self, splits: Sequence[Layout], scaling: bool) -> list[Layout]:
        """The even split of rows, in the data's order, over the best split's devices; passes can hold the longest rows.

        A training without a plan does the same.
        """
        problem, longest = self.problem, self.problem.lengths[-1]
        if not splits:
            return []
        even = split_evenly(problem.devices, splits[0].active, splits[0].global_batch, problem.multiple_of)
        if even is None:
            return []
        most = (wall // longest if wall else share for share, wall in zip(even.shares, self.walls, strict=True))
        rows = tuple(map(min, even.shares, most))
        return [layout_of(even.shares, rows)] if all(rows[i] for i in even.active) else []


class TextStage:
    """The stage that chooses the next probes by the model of costs."""

    def __init__(self, text: TextModel, budget: Budget, splits: bool) -> None:
        self._text, self._budget, self._with_splits = text, budget, splits
        self._problem = text.problem

    def next_probes(self) -> tuple[Probe, ...]:
        """The next probe of every device alone, or the next split; empty when the stage is over."""
        return (
            self._next_alone(self._next_passes, self._text.live)
            or self._next_alone(self._next_whole, self._text.able)
            or self._next_split()
        )

    def _next_alone(self, choose: Callable[[int], Layout | None], devices: Sequence[int]) -> tuple[Probe, ...]:
        """A probe of each device alone for which there is another layout, if the budget affords all of them."""
        layouts = {i: layout for i in devices if (layout := choose(i))}
        known = all(self._text.alone[i] for i in devices)  # without costs there is nothing to go on with
        turn = 1 + max((len(self._text.tried_alone(i)) for i in layouts), default=0)
        probes = [self._probe(layout, "solo", turn, known) for layout in layouts.values()]
        return tuple(probe for probe in probes if probe) if all(probes) else ()

    def _probe(self, layout: Layout, stage: Stage, turn: int, plan: bool) -> Probe | None:
        """The probe, if the budget affords it: without a `plan`, all of the budget."""
        if not self._budget.affords(layout, stage if plan else "race"):
            return None
        seconds = self._budget.probe_seconds(layout, stage)
        return Probe(layout, stage, min(seconds, PASS_SECONDS) if layout.length else seconds, turn)

    # ------------------------------------------------------------------ passes of one length

    def _next_passes(self, position: int) -> Layout | None:
        tried = [seen.probe.layout for seen in self._text.tried_alone(position)]
        return next((layout for layout in self._passes(position) if layout not in tried), None)

    def _passes(self, position: int) -> Iterator[Layout]:
        middle, longest = self._quantile(MIDDLE), self._problem.lengths[-1]
        tokens = max(SMALL * middle, longest)
        yield self._same_length(position, middle, tokens)
        while self._worth_growing(position, longest, tokens := tokens * WIDE):
            yield self._same_length(position, longest, tokens)
        largest = max((longest, *self._text.single_passes(position)))
        yield self._same_length(position, self._quantile(SHORT), max(largest // WIDE, longest), MOST_PASSES)
        for length in (longest, middle, self._quantile(LONG)):
            yield self._same_length(position, length, largest)

    def _same_length(self, position: int, length: int, tokens: int, passes: int = 1) -> Layout:
        most = self._problem.global_batch or self._problem.max_global_batch or tokens
        rows = max(1, min(tokens // length, most))
        return msgspec.structs.replace(solo(self._problem.devices, position, rows * passes, rows), length=length)

    def _quantile(self, part: float) -> int:
        lengths = self._problem.lengths
        return max(1, lengths[int(part * (len(lengths) - 1))])

    def _worth_growing(self, position: int, length: int, tokens: int) -> bool:
        """True if larger passes are wanted, as none shows yet what tokens cost, may fit, and are ever taken."""
        steps = self._text.single_passes(position).values()
        if not steps or max(steps) >= min(LONG_ENOUGH * min(steps), self._budget.longest_step() / WIDE):
            return False
        most = self._problem.global_batch or self._problem.max_global_batch or LARGEST_BATCH
        wall = self._text.walls[position]
        return tokens <= most * length and not (wall and tokens > wall)

    # ------------------------------------------------------------------ global batches

    def _next_whole(self, position: int) -> Layout | None:
        """The global batch on one device, again in smaller passes if it ran out of memory."""
        tried = [one for one in self._text.tried_alone(position) if one.probe.layout.costs]
        if len(tried) > RETREATS or any(isinstance(one, Timed | Failed) for one in tried):
            return None
        if not self._text.can_hold((position,)):
            return None
        layout = self._text.layout((position,), self._text.batch)
        return layout if all(one.probe.layout.tokens != layout.tokens for one in tried) else None

    def _next_split(self) -> tuple[Probe, ...]:
        """The split that the costs predict to be fastest, if it isn't much like one before."""
        tried = [one.probe.layout for one in self._text.seen.in_stage("split") if one.probe.layout.costs]
        layout = self._text.best_split if self._with_splits and len(tried) < MOST_TURNS else None
        if layout is None or any(one.tokens == layout.tokens and same_measurement(one, layout) for one in tried):
            return ()
        probe = self._probe(layout, "split", len(tried), bool(self._text.splits))
        return (probe,) if probe else ()
