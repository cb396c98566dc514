"""One device alone: the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from evener.plan.layout import BEST_SINGLE

from ..types import Layout
from .family import Family, Offer, View


class SoloFamily(Family):
    """One training on one device; the others are left out."""

    name = kind = "solo"
    titled = BEST_SINGLE
    advice = "Use {devices:and}{alone:alone}, {shares:shares} samples a step"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best device, and others that the race favours."""
        return view.singles

    def count_groups(self, offer: Offer, devices: int) -> int:
        """The number of process groups that this family adds: none, as every search measures one device alone."""
        return 0
