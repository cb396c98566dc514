"""Choose layouts for rows of unequal length."""

from __future__ import annotations

from collections.abc import Sequence

from evener.plan.layout import Knots

from ..families import split_evenly
from ..types import End, Layout, Stage, layout_of
from .decisions import explain_too_long
from .layouts import NO_CURVE
from .text_model import TextModel


class TextPolicy:
    """Chooses which layouts to compare, for workloads whose rows differ in length.

    Rows are assigned to devices by what they cost, which depends on their length. `RowPolicy` does
    the same for rows that all cost the same.
    """

    def __init__(self, machine: TextModel) -> None:
        self.machine = machine
        self.problem = machine.problem
        self.seen = machine.seen

    def why_impossible(self) -> End | None:
        """Return why no layout can work, or None.

        The only possible reason is a row that is too long for every device's memory.
        """
        return None if self.machine.can_hold(self.machine.live) else explain_too_long(self.problem)

    def is_sensible(self, layout: Layout) -> bool:
        """Whether the layout may become the plan.

        Layouts whose rows all have one length are ruled out: they only serve to measure what that
        length costs.
        """
        return bool(layout.costs) or (layout.by_rows and layout.traits.together)

    def seconds_alone(self, _layout: Layout) -> float | None:
        """Return None, because this time isn't predicted for rows of unequal length.

        `RowPolicy.seconds_alone` returns how long the slowest device would take for its rows if it
        trained on its own.
        """
        return None

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return empty curves, because plans for rows of unequal length have costs instead."""
        return NO_CURVE * len(layout.shares)

    # ------------------------------------------------------------------ candidates

    def singles(self) -> list[Layout]:
        """Return the fastest layout on one device; empty if no device can hold the longest row."""
        ran = {}
        for seen in self.seen.timed(Stage.SOLO):
            if seen.probe.layout.costs:
                ran[seen.probe.layout.active] = seen.probe.layout
        layouts = []
        for i in self.machine.devices_with_cost:
            if not self.machine.can_hold((i,)):
                continue
            layout = ran.get((i,)) or self.machine.layout((i,), self.machine.batch)
            if self.seen.first_failure(layout) is None:
                layouts.append(layout)
        return sorted(layouts, key=self.machine.predicted_rate, reverse=True)[:1]

    def best_splits(self) -> list[Layout]:
        """Return the layouts over several devices that belong in the final comparison.

        They are the fastest layout that was measured, and the one that was measured last, because
        its rows were assigned with the most accurate costs.
        """
        ran = self.machine.fitting_splits
        by_rate = sorted(ran, key=lambda one: -one.samples_per_second)
        return list(dict.fromkeys(one.probe.layout for one in (*ran[-1:], *by_rate[:1])))

    def even_splits(self, splits: Sequence[Layout], with_fewer_devices: bool) -> list[Layout]:
        """Return a layout with an equal number of rows on each device of the first split.

        Rows are taken in the order of the data, as in training without a plan. Micro-batches are so
        small that they fit even if all rows have the longest length. Empty if there is no split, or
        if that doesn't fit.
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
        for share, limit in zip(even.shares, self.machine.token_limits, strict=True):
            rows.append(min(share, limit // longest) if limit else share)
        if not all(rows[i] for i in even.active):
            return []
        return [layout_of(even.shares, tuple(rows))]
