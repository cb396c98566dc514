"""Options and candidates of a search: which kinds of layouts it may try, and which it compares.

If a layout ran out of memory, functions of this module derive a smaller one from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.plan.layout import Knots

from ..families import FAMILIES, Family, PackMode, Placement, find_families
from ..types import Layout, layout_of

# the curve of a device in a layout whose plan needs no curves: no points and 0 rows; multiply it by
# the number of devices
NO_CURVE: tuple[tuple[Knots, int]] = (((), 0),)
Knob = Literal["xla", "mixed", "workers0", "workers2", "workers4", "workers8"]
# relative; a smaller difference in speed isn't worth a change, and the effect of a smaller
# difference in shares can't be measured
TIE = 0.01
# factor for the next batch after one ran out of memory, which costs 3 s on a GPU
RETREAT = 0.7
RETREATS = 4  # number of attempts with smaller batches: down to a quarter of the first batch


class LayoutOptions(msgspec.Struct, frozen=True):
    """Which kinds of layouts and tuning options a search may try."""

    families: tuple[str, ...] = msgspec.field(default_factory=lambda: tuple(FAMILIES))
    placements: tuple[Placement, ...] = ()
    pack_modes: tuple[PackMode, ...] = (
        "",
    )  # "": plain processes; logical: equal parts of the memory; mps: NVIDIA's MPS daemon
    knobs: tuple[Knob, ...] = ()  # the winner is also measured with each of these
    left_out: tuple[str, ...] = ()  # messages about requests that aren't possible on this machine
    scaling: bool = True  # also try even splits over 2, 4, ... of the devices
    shards: bool = False  # try sharded trainings even if each device can hold the whole model

    @property
    def wanted(self) -> tuple[Family, ...]:
        """The layout families (kinds of layouts) that were requested."""
        return find_families(self.families)

    @property
    def needs_more_children(self) -> bool:
        """Whether the final comparison needs additional processes, which take time to start."""
        return (
            self.scaling or bool(self.knobs) or any(family.more_children for family in self.wanted)
        )

    @property
    def needs_split_probes(self) -> bool:
        """Whether splits (steps over several devices) are measured before the final comparison.

        They are needed if a requested layout family has costs that only such steps show.
        """
        return any(family.explored for family in self.wanted)


BALANCE = LayoutOptions(
    tuple(one.name for one in FAMILIES.values() if one.in_balance), scaling=False
)


class Candidate(msgspec.Struct, frozen=True):
    """A layout that may take part in the final comparison, and the layout family that proposed it.

    `extra` marks an optional candidate: if there is no time to measure it, users aren't informed.
    """

    family: Family
    layout: Layout
    extra: bool = False

    @property
    def synchronous(self) -> bool:
        """Whether all devices of the layout train one model together, without tuning options."""
        return self.layout.traits.by_shares and not self.layout.knobs

    @property
    def simplicity(self) -> tuple[int, int, int, int, int]:
        """Sort key that puts the simpler of two layouts first.

        Of equally fast layouts, the simplest is preferred.
        """
        layout = self.layout
        further = sum(layout.passes(i) - 1 for i in layout.active) if layout.in_passes else 0
        return (
            len(layout.knobs),
            further,
            self.family.simplicity,
            len(layout.active),
            layout.processes,
        )


def shrink(layout: Layout, quantum: int = 1) -> Layout | None:
    """Return the layout with 30 % fewer rows on each device; None if a device would have none.

    The rows remain multiples of `quantum`, and the numbers of gradient-accumulation passes stay the
    same.
    """
    shares = []
    for share in layout.shares:
        smaller = int(share * RETREAT) // quantum * quantum
        if share and not smaller:
            return None
        shares.append(smaller)
    micro = []
    if layout.in_passes:
        for i, share in enumerate(shares):
            passes = max(1, layout.passes(i))
            micro.append(-(-share // passes))  # rounded up
    return msgspec.structs.replace(layout, shares=tuple(shares), micro=tuple(micro))


def divide(layout: Layout, full_devices: tuple[int, ...]) -> Layout | None:
    """Return the layout with 30 % smaller micro-batches on devices that ran out of memory.

    The rows per step stay the same, so there are more gradient-accumulation passes. `full_devices`
    lists the positions of these devices; empty means all. None if a micro-batch would be empty.
    """
    rows = list(layout.pass_rows)
    for i in full_devices or layout.active:
        if not layout.shares[i]:  # it only holds state, so it needs no passes
            continue
        rows[i] = int(rows[i] * RETREAT)
        if not rows[i]:
            return None
    smaller = layout_of(layout.shares, tuple(rows))
    return msgspec.structs.replace(smaller, kind=layout.kind, state=layout.state)


def same_measurement(one: Layout, other: Layout, tolerance: float = TIE) -> bool:
    """Whether two layouts are so similar that a measurement can't show a difference.

    `tolerance` is the largest relative difference in a device's rows.
    """
    if one.kind != other.kind or any(one.passes(i) != other.passes(i) for i in one.active):
        return False
    shares = zip(one.shares, other.shares, strict=True)
    return all(abs(a - b) <= tolerance * max(a, b) for a, b in shares)


def is_no_larger(one: Layout, other: Layout) -> bool:
    """Whether `one` needs at most as much memory as `other` on every device.

    Both must use the same devices. If shares depend on the lengths of rows, this is True only for
    equal layouts.
    """
    if not (one.by_rows and other.by_rows):
        return one == other
    if (one.placement, one.knobs, one.state) != (other.placement, other.knobs, other.state):
        return False
    if one.processes > other.processes:
        return False
    # with several passes, gradients are kept between them
    if one.in_passes and not other.in_passes:
        return False
    return all(a <= b for a, b in zip(one.pass_rows, other.pass_rows, strict=True))
