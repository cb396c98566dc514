"""Uneven shares, as the devices' speeds say."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.families.family import Family, Offer, View
from evener.balancer.types import Layout
from evener.plan_layout import BEST_SPLIT


class SplitFamily(Family):
    """One training whose devices have the shares that they finish at the same time."""

    name = kind = "split"
    fewest_devices = 2
    simplicity = 2
    start_cost = 1.5  # its processes have to meet
    explored = True

    def layouts(self, view: View) -> Sequence[Layout]:
        """The preferred split, and others that may beat it; one of them may be one device."""
        return view.splits

    def to_start(self, offer: Offer, devices: int) -> tuple[int, int]:
        """One group: the even split over all devices has the same processes."""
        return 1, 1

    def title(self, layout: Layout, devices: int) -> str:
        """As in the plan's evidence."""
        return BEST_SPLIT

    def advice(self, layout: Layout, samples: str, over: str, ratios: str, only: bool) -> str:
        """Split 0.591:0.409 over GPU:0 and GPU:1 (820 + 568 samples)."""
        if layout.costs:
            return f"Split the cost of each batch {ratios} over {over} ({layout.global_batch} samples)"
        return f"Split {ratios} over {over} ({samples} samples)"
