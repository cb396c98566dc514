"""The layouts that are worth a race where rows are of unequal length."""

from __future__ import annotations

from collections.abc import Sequence

from evener.plan.layout import Knots

from ..families import split_evenly
from ..types import End, Layout, layout_of
from .decisions import explain_too_long
from .layouts import NO_CURVE
from .text_model import TextModel


class TextPolicy:
    """What to race where a device's time follows from the lengths of its rows."""

    def __init__(self, machine: TextModel) -> None:
        self.machine = machine
        self.problem = machine.problem
        self.seen = machine.seen

    def why_none(self) -> End | None:
        """Why no device can train; None if one holds the longest row."""
        return None if self.machine.can_hold(self.machine.live) else explain_too_long(self.problem)

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
        holding = [i for i in self.machine.able if self.machine.can_hold((i,))]
        layouts = [ran.get((i,)) or self.machine.layout((i,), self.machine.batch) for i in holding]
        whole = [layout for layout in layouts if self.seen.broken(layout) is None]
        return sorted(whole, key=self.machine.predicted_rate, reverse=True)[:1]

    def best_splits(self) -> list[Layout]:
        """The last split that exploration measured, and the fastest."""
        ran = self.machine.fitting_splits
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
        even = split_evenly(devices, split.active, split.global_batch, self.machine.quantum)
        if even is None:
            return []
        longest = self.problem.lengths[-1]
        rows = []
        for share, wall in zip(even.shares, self.machine.walls, strict=True):
            rows.append(min(share, wall // longest) if wall else share)
        if not all(rows[i] for i in even.active):
            return []
        return [layout_of(even.shares, tuple(rows))]
