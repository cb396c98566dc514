"""Candidate layouts, the options that choose families, and smaller variants after a failure."""

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
    """Which layouts a search may try."""

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
        """The layout families with these names."""
        return find_families(self.families)

    @property
    def needs_more_children(self) -> bool:
        """Whether the final comparison needs new probe processes."""
        return (
            self.scaling or bool(self.knobs) or any(family.more_children for family in self.wanted)
        )

    @property
    def with_splits(self) -> bool:
        """Whether a wanted layout family needs measured splits."""
        return any(family.explored for family in self.wanted)


BALANCE = LayoutOptions(
    tuple(one.name for one in FAMILIES.values() if one.in_balance), scaling=False
)


class Candidate(msgspec.Struct, frozen=True):
    """A layout for the final comparison, with the family that proposes it.

    `extra` marks an additional proposal, whose absence isn't reported.
    """

    family: Family
    layout: Layout
    extra: bool = False

    @property
    def synchronous(self) -> bool:
        """Whether it trains one model by shares, without knobs."""
        return self.layout.traits.by_shares and not self.layout.knobs

    @property
    def simplicity(self) -> tuple[int, int, int, int, int]:
        """Sort key that puts simpler layouts first, to choose between equally fast ones."""
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
    """Return the layout with 30 % fewer rows per device, or None if a device would have none.

    Shares stay multiples of `quantum`, and each device keeps its number of passes.
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


def divide(layout: Layout, full: tuple[int, ...]) -> Layout | None:
    """Return the layout with 30 % smaller passes on the devices that ran out of memory.

    An empty `full` means all devices. None if a pass would have no rows.
    """
    rows = list(layout.pass_rows)
    for i in full or layout.active:
        if not layout.shares[i]:  # it only holds state, so it needs no passes
            continue
        rows[i] = int(rows[i] * RETREAT)
        if not rows[i]:
            return None
    smaller = layout_of(layout.shares, tuple(rows))
    return msgspec.structs.replace(smaller, kind=layout.kind, state=layout.state)


def same_measurement(one: Layout, other: Layout, near: float = TIE) -> bool:
    """Whether two layouts are too similar for measurements to distinguish.

    `near` is the largest relative difference of their shares.
    """
    if one.kind != other.kind or any(one.passes(i) != other.passes(i) for i in one.active):
        return False
    shares = zip(one.shares, other.shares, strict=True)
    return all(abs(a - b) <= near * max(a, b) for a, b in shares)


def is_no_larger(one: Layout, other: Layout) -> bool:
    """Whether one layout needs no more memory than the other on any device."""
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
