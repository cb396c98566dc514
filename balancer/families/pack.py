"""Several trainings side by side on one device, for sweeps over settings."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.families.family import Family, Offer, PackMode, View
from evener.balancer.types import Layout

MODES: dict[str, str] = {"": "", "logical": " with equal parts of the memory", "mps": " under MPS"}
SIZES = 2  # that a mode is measured with at the least


def pack_on(single: Layout, processes: int, mode: PackMode = "", batch: int | None = None) -> Layout:
    """Several trainings side by side on the device of a solo layout, each with its batch unless another is given."""
    size = single.global_batch if batch is None else batch
    return Layout("pack", tuple(size if share else 0 for share in single.shares), processes, mode)


class PackFamily(Family):
    """As many trainings as get most out of a device."""

    name = kind = "pack"
    simplicity = 4
    start_cost = 0.8  # of each training
    more_children = True
    plural = "packs"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best number of trainings in each mode, or the fewest."""
        return view.packs

    def to_start(self, offer: Offer, devices: int) -> tuple[int, int]:
        """Two sizes of each mode."""
        packs = SIZES * len(offer.pack_modes)
        return packs, packs

    def title(self, layout: Layout, devices: int) -> str:
        """With the number of trainings and the mode."""
        return f"pack of {layout.processes}{MODES.get(layout.placement, '')}"

    def advice(self, layout: Layout, samples: str, over: str, ratios: str, only: bool) -> str:
        """Run 5 trainings side by side on GPU:0, 256 samples each."""
        mode = MODES.get(layout.placement, "")
        return f"Run {layout.processes} trainings side by side on {over}{mode}, {layout.global_batch} samples each"

    def subject(self, layout: Layout) -> str:
        """5 trainings side by side."""
        return f"{layout.processes} trainings side by side"
