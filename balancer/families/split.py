"""Uneven shares, as the devices' speeds say."""

from __future__ import annotations

from collections.abc import Sequence

from evener.plan.layout import BEST_SPLIT

from ..types import Layout
from .family import Family, View


class SplitFamily(Family):
    """One training whose devices have the shares that they finish at the same time."""

    name = kind = "split"
    fewest_devices = 2
    simplicity = 2
    start_cost = 1.5  # its processes have to meet
    explored = True
    titled = BEST_SPLIT
    advice = "Split {ratios:ratios} over {devices:and} ({shares:shares} samples)"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The preferred split, and others that may beat it; one of them may be one device."""
        return view.splits

    def sentences(self) -> dict[str, str]:
        """The family's sentences, with another advice for rows that are assigned by cost: there the cost is split."""
        by_cost = "Split the cost of each batch {ratios:ratios} over {devices:and} ({samples} samples){knobs:with}"
        return {**super().sentences(), "advice.cost": by_cost}
