"""One device alone: the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.families.family import Family, Offer, View
from evener.balancer.types import Layout
from evener.plan_layout import BEST_SINGLE


class SoloFamily(Family):
    """One training on one device; the others are left out."""

    name = kind = "solo"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best device, and others that the race favours."""
        return view.singles

    def to_start(self, offer: Offer, devices: int) -> tuple[int, int]:
        """Nothing more: every search measures one device alone."""
        return 0, 0

    def title(self, layout: Layout, devices: int) -> str:
        """As in the plan's evidence."""
        return BEST_SINGLE

    def advice(self, layout: Layout, samples: str, over: str, ratios: str, only: bool) -> str:
        """Use GPU:0 alone, 256 samples a step."""
        return f"Use {over}{'' if only else ' alone'}, {samples} samples a step"
