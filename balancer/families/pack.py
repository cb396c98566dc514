"""Several trainings side by side on one device, for sweeps over settings."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Layout
from .family import Family, Offer, PackMode, View

SIZES = 2  # that a mode is measured with at the least


def pack_on(single: Layout, processes: int, mode: PackMode = "", batch: int | None = None) -> Layout:
    """Several trainings side by side on the device of a solo layout, each with its batch unless another is given."""
    size = single.global_batch if batch is None else batch
    return Layout("pack", tuple(size if share else 0 for share in single.shares), processes, mode)


class PackFamily(Family):
    """The number of trainings that together get the most out of one device."""

    name = kind = "pack"
    simplicity = 4
    start_cost = 0.8  # of each training
    more_children = True
    titled = "pack of {0.processes}{mode}"
    advice = "Run {trainings} trainings side by side on {devices:and}{mode:mode}, {samples} samples each"
    subjected = "{trainings} trainings side by side"
    plural = "packs"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best number of trainings in each mode, or the fewest."""
        return view.packs

    def count_groups(self, offer: Offer, devices: int) -> int:
        """Two sizes of each mode."""
        return SIZES * len(offer.pack_modes)
