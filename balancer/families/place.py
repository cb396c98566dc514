"""The workload's own placements: a model's parts on several devices."""

from __future__ import annotations

from collections.abc import Sequence

from evener.shares.whole_rows import even

from ..types import Layout
from .family import Family, Offer, Placement, View


def place_on(devices: int, placement: Placement, batch: int) -> Layout | None:
    """The model's parts on the first devices; the shares only say who takes part. None if there are too few."""
    used = min(devices, placement.devices)
    if used < 2 or batch < used:
        return None
    shares = (*even(batch, used), *[0] * (devices - used))
    return Layout("place", shares, placement=placement.name)


class PlaceFamily(Family):
    """One training in one process, whose parts lie as the workload says."""

    name = kind = "place"
    fewest_devices = 2
    simplicity = 3
    more_children = True
    titled = "place {0.placement}"
    advice = "Place the model's parts as {placement} over {devices:and}, {samples} samples"
    subjected = "the placement {placement}"
    plural = "placements"

    def layouts(self, view: View) -> Sequence[Layout]:
        """Each placement, at the batch of the best single device."""
        if view.common_batch is None or not view.by_rows:
            return []
        found = [place_on(view.devices, one, view.common_batch) for one in view.options.placements]
        return [layout for layout in found if layout is not None]

    def count_groups(self, offer: Offer, devices: int) -> int:
        """A process for each placement."""
        return len(offer.placements)
