"""Uneven shares, as the devices' speeds say."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.families.family import Family, View
from evener.balancer.types import Layout
from evener.plan_layout import BEST_SPLIT


class SplitFamily(Family):
    """One training whose devices have the shares that they finish at the same time."""

    name = kind = "split"
    fewest_devices = 2
    simplicity = 2
    start_cost = 1.5  # its processes have to meet
    explored = True
    titled = BEST_SPLIT
    advice = "Split {ratios} over {over} ({samples} samples)"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The preferred split, and others that may beat it; one of them may be one device."""
        return view.splits

    def advise(self, layout: Layout, samples: str, over: str, ratios: str, alone: str) -> str:
        """The beginning of the verdict; where rows are dealt by cost, it is the cost that is split."""
        if layout.costs:
            return f"Split the cost of each batch {ratios} over {over} ({layout.global_batch} samples)"
        return super().advise(layout, samples, over, ratios, alone)
