"""Chooses the layouts that are worth racing if rows have unequal lengths."""

from __future__ import annotations

from collections.abc import Sequence

from evener.plan.layout import Knots

from ..families import split_evenly
from ..types import End, Layout, Stage, layout_of
from .decisions import explain_too_long
from .layouts import NO_CURVE
from .text_model import TextModel


class TextPolicy:
    """Chooses the layouts to race if the cost of rows differs.

    A device's time then depends on the lengths of its rows.
    """

    def __init__(self, machine: TextModel) -> None:
        self.machine = machine
        self.problem = machine.problem
        self.seen = machine.seen

    def why_none(self) -> End | None:
        """Return why no device can train; None if at least one can hold the longest row."""
        return None if self.machine.can_hold(self.machine.live) else explain_too_long(self.problem)

    def is_sensible(self, layout: Layout) -> bool:
        """True if the layout trains, and isn't just a probe of passes.

        Its rows are assigned by cost, or it is a split by number of rows.
        """
        return bool(layout.costs) or (layout.by_rows and layout.traits.together)

    def apart_seconds(self, _layout: Layout) -> float | None:
        """Return None: how long each device alone takes for its rows isn't known."""
        return None

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return an empty curve for each device, because plans have the costs of rows instead."""
        return NO_CURVE * len(layout.shares)

    # ------------------------------------------------------------------ candidates

    def singles(self) -> list[Layout]:
        """Return the layout of the global batch on the fastest single device.

        Devices on which that layout failed in the race are left out. Return an empty list if no
        device can hold the longest row.
        """
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
        """Return the last split that exploration measured, and the fastest measured split.

        If they are equal, the list has one layout.
        """
        ran = self.machine.fitting_splits
        by_rate = sorted(ran, key=lambda one: -one.samples_per_second)
        return list(dict.fromkeys(one.probe.layout for one in (*ran[-1:], *by_rate[:1])))

    def even_splits(self, splits: Sequence[Layout], scaling: bool) -> list[Layout]:
        """Return the even split over the devices of the best split.

        The best split is the first of `splits`; without one, return an empty list. Even splits over
        fewer devices (`scaling`) aren't supported for unequal rows.
        """
        if not splits:
            return []
        # rows are assigned in the order of the data, like in a training without a plan
        split = splits[0]
        devices = self.problem.devices
        even = split_evenly(devices, split.active, split.global_batch, self.machine.quantum)
        if even is None:
            return []
        # a pass has so few rows that it fits even if all have the longest length
        longest = self.problem.lengths[-1]
        rows = []
        for share, limit in zip(even.shares, self.machine.token_limits, strict=True):
            rows.append(min(share, limit // longest) if limit else share)
        if not all(rows[i] for i in even.active):
            return []
        return [layout_of(even.shares, tuple(rows))]
