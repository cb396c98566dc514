"""Equal shares: what frameworks do by default."""

from __future__ import annotations

from collections.abc import Sequence

from evener.plan.layout import EVEN_SPLIT

from ..types import Layout
from .family import Family, Offer, View


def device_counts(devices: int) -> tuple[int, ...]:
    """2, 4, 8, ... and all of them: how many devices an even split is measured on."""
    counts, count = [], 2
    while count < devices:
        counts.append(count)
        count *= 2
    return (*counts, devices) if devices > 1 else ()


class EvenFamily(Family):
    """One training whose devices have equal shares."""

    name, kind = "even", "split"
    fewest_devices = 2
    simplicity = 1
    start_cost = 1.5  # its processes have to meet
    equal_shares = True
    titled = EVEN_SPLIT
    advice = "Split evenly over {devices:and} ({shares:shares} samples)"

    def layouts(self, view: View) -> Sequence[Layout]:
        """Over all devices and fewer, once it is clear what batch splits take."""
        return view.even_splits

    def count_groups(self, offer: Offer, devices: int) -> int:
        """The number of process groups: one for each number of devices."""
        return len(device_counts(devices))

    def title(self, layout: Layout, devices: int) -> str:
        """The name, with the number of devices where that isn't all."""
        return self.titled if len(layout.active) == devices else f"even over {len(layout.active)}"
