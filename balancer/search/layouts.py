"""The layouts that a search is asked for, the candidates of a race, and layouts made of others."""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.plan.layout import Knots

from ..families import FAMILIES, Family, PackMode, Placement, find_families
from ..types import Layout, layout_of

NO_CURVE: tuple[tuple[Knots, int]] = (((), 0),)  # of a device in a layout whose plan needs none
Knob = Literal["xla", "mixed", "workers0", "workers2", "workers4", "workers8"]
# relative; a smaller difference of speeds isn't worth a change, and one of shares can't be measured
TIE = 0.01
# of a batch that ran out of memory: the next to try, as a child that runs out costs 3 s on a GPU
RETREAT = 0.7
RETREATS = 4  # tries of smaller ones: to a quarter


class LayoutOptions(msgspec.Struct, frozen=True):
    """The families of layouts that a search is asked for, and what the machine offers them."""

    families: tuple[str, ...] = msgspec.field(default_factory=lambda: tuple(FAMILIES))
    placements: tuple[Placement, ...] = ()
    pack_modes: tuple[PackMode, ...] = (
        "",
    )  # "": plain processes; logical: equal parts of the memory; mps: a daemon
    knobs: tuple[Knob, ...] = ()  # the winner is measured with each as well
    left_out: tuple[str, ...] = ()  # requests that can't be met here, in sentences
    scaling: bool = True  # an even split over 2, 4, ... of the devices too
    shards: bool = False  # sharded trainings also where each device holds the whole model

    @property
    def wanted(self) -> tuple[Family, ...]:
        """The families that are asked for."""
        return find_families(self.families)

    @property
    def needs_more_children(self) -> bool:
        """True if the race will start children that exploration doesn't."""
        return (
            self.scaling or bool(self.knobs) or any(family.more_children for family in self.wanted)
        )

    @property
    def with_splits(self) -> bool:
        """True if exploration measures splits."""
        return any(family.explored for family in self.wanted)


BALANCE = LayoutOptions(
    tuple(one.name for one in FAMILIES.values() if one.in_balance), scaling=False
)


class Candidate(msgspec.Struct, frozen=True):
    """One layout in the race. `extra`: not the family's first; not reported as missing when the
    budget ends.
    """

    family: Family
    layout: Layout
    extra: bool = False

    @property
    def synchronous(self) -> bool:
        """True if the layout is one training on one or several devices, so that its global batch
        can be compared.
        """
        return self.layout.traits.by_shares and not self.layout.knobs

    @property
    def simplicity(self) -> tuple[int, int, int, int, int]:
        """The key that decides a tie: the smaller it is, the simpler the layout is to use."""
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
    """The layout with a smaller batch everywhere, after it ran out of memory; None if it can't
    shrink.
    """
    shares = tuple(int(share * RETREAT) // quantum * quantum for share in layout.shares)
    if any(before and not now for before, now in zip(layout.shares, shares, strict=True)):
        return None
    micro: tuple[int, ...] = ()
    if layout.in_passes:
        micro = tuple(-(-share // max(1, layout.passes(i))) for i, share in enumerate(shares))
    return msgspec.structs.replace(layout, shares=shares, micro=micro)


def divide(layout: Layout, full: tuple[int, ...]) -> Layout | None:
    """A layout in more passes on the devices that ran out of memory, or on all; None if its passes
    have one row.
    """
    rows = list(layout.pass_rows)
    for i in full or layout.active:
        rows[i] = int(rows[i] * RETREAT)
        if not rows[i]:
            return None
    smaller = layout_of(layout.shares, tuple(rows))
    return msgspec.structs.replace(smaller, kind=layout.kind, state=layout.state)


def same_measurement(one: Layout, other: Layout, near: float = TIE) -> bool:
    """True if two layouts have equally many passes and shares too near for a measurement to tell
    them apart.
    """
    if one.kind != other.kind or any(one.passes(i) != other.passes(i) for i in one.active):
        return False
    shares = zip(one.shares, other.shares, strict=True)
    return all(abs(a - b) <= near * max(a, b) for a, b in shares)


def is_no_larger(one: Layout, other: Layout) -> bool:
    """True if `one` takes no more memory than `other` on the same devices."""
    if not (one.by_rows and other.by_rows):
        return one == other
    if (one.placement, one.knobs) != (other.placement, other.knobs):
        return False
    if one.processes > other.processes:
        return False
    if one.in_passes and not other.in_passes:  # passes keep gradients between them
        return False
    return all(a <= b for a, b in zip(one.pass_rows, other.pass_rows, strict=True))
