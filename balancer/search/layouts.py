"""Families of layouts, and the candidates of a race."""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.balancer.types import Layout, layout_of
from evener.shares.whole_rows import even

Family = Literal["solo", "even", "split", "pack", "place"]
FAMILIES: tuple[Family, ...] = ("solo", "even", "split", "pack", "place")
PackMode = Literal["", "logical", "mps"]
Knob = Literal["xla", "mixed"]
RETREAT = 0.7  # of a batch that ran out of memory in the race
SAME_SHARE = 0.015  # relative: layouts whose shares differ by less are the same measurement
SIMPLEST_FIRST: tuple[Family, ...] = ("solo", "even", "split", "place", "pack")


class Placement(msgspec.Struct, frozen=True):
    """A workload's own way to lay its parts on devices."""

    name: str
    devices: int = 2  # most that it uses


class LayoutOptions(msgspec.Struct, frozen=True):
    """Which families of layouts a search is asked for, and what the machine offers of them."""

    families: tuple[Family, ...] = FAMILIES
    placements: tuple[Placement, ...] = ()
    pack_modes: tuple[PackMode, ...] = ("",)  # "": plain processes; logical: equal parts of the memory; mps: a daemon
    knobs: tuple[Knob, ...] = ()  # the winner is measured with each as well
    left_out: tuple[str, ...] = ()  # what was asked for and can't be had here, in sentences
    scaling: bool = True  # an even split over 2, 4, ... of the devices too

    @property
    def needs_more_children(self) -> bool:
        """Whether the race will start children that exploration doesn't."""
        return self.scaling or "pack" in self.families or "place" in self.families or bool(self.knobs)


BALANCE = LayoutOptions(("solo", "even", "split"), scaling=False)  # what a plan needs


class Candidate(msgspec.Struct, frozen=True):
    """One layout in the race. `extra`: not the family's first; not reported as missing when the budget ends."""

    family: Family
    layout: Layout
    extra: bool = False

    @property
    def synchronous(self) -> bool:
        """Whether one training steps on one or several devices, so that its global batch can be compared."""
        return self.family in ("solo", "even", "split") and not self.layout.knobs

    @property
    def simplicity(self) -> tuple[int, int, int, int, int]:
        """For a tie: the smaller is the simpler to live with."""
        layout = self.layout
        further = sum(layout.passes(i) - 1 for i in layout.active) if layout.in_passes else 0
        family = SIMPLEST_FIRST.index(self.family)
        return (len(layout.knobs), further, family, len(layout.active), layout.processes)


def find_family(layout: Layout) -> Family:
    """The family of one training on one device, or on several."""
    return "solo" if layout.kind == "solo" else "split"


def device_counts(devices: int) -> tuple[int, ...]:
    """2, 4, 8, ... and all of them: how many devices an even split is measured on."""
    counts, count = [], 2
    while count < devices:
        counts.append(count)
        count *= 2
    return (*counts, devices) if devices > 1 else ()


def split_evenly(devices: int, positions: tuple[int, ...], batch: int, quantum: int = 1) -> Layout | None:
    """The batch spread evenly over some devices, in whole quanta; None if it has too few for them."""
    if batch // quantum < len(positions) or batch % quantum:
        return None
    quanta = dict(zip(positions, even(batch // quantum, len(positions)), strict=True))
    return Layout("split", tuple(quanta.get(i, 0) * quantum for i in range(devices)))


def pack_on(single: Layout, processes: int, mode: PackMode = "", batch: int | None = None) -> Layout:
    """Several trainings side by side on the device of a solo layout, each with its batch unless another is given."""
    size = single.global_batch if batch is None else batch
    return Layout("pack", tuple(size if share else 0 for share in single.shares), processes, mode)


def place_on(devices: int, placement: Placement, batch: int) -> Layout | None:
    """The model's parts on the first devices; the shares only say who takes part. None if there are too few."""
    used = min(devices, placement.devices)
    if used < 2 or batch < used:
        return None
    shares = (*even(batch, used), *[0] * (devices - used))
    return Layout("place", shares, placement=placement.name)


def shrink(layout: Layout, quantum: int = 1) -> Layout | None:
    """The layout with a smaller batch everywhere, after it ran out of memory; None if it can't shrink."""
    shares = tuple(int(share * RETREAT) // quantum * quantum for share in layout.shares)
    if any(before and not now for before, now in zip(layout.shares, shares, strict=True)):
        return None
    micro = tuple(-(-share // max(1, layout.passes(i))) for i, share in enumerate(shares)) if layout.in_passes else ()
    return msgspec.structs.replace(layout, shares=shares, micro=micro)


def divide(layout: Layout, full: tuple[int, ...]) -> Layout | None:
    """The same shares in more passes on the devices that ran out of memory, or on all; None for passes of one row."""
    rows = list(layout.pass_rows)
    for i in full or layout.active:
        rows[i] = int(rows[i] * RETREAT)
        if not rows[i]:
            return None
    return layout_of(layout.shares, tuple(rows))


def is_even(layout: Layout, quantum: int = 1) -> bool:
    """Whether the shares of the devices that take part are rows, and differ by at most one quantum."""
    active = [layout.shares[i] for i in layout.active]
    return layout.by_rows and len(active) > 1 and max(active) - min(active) <= quantum


def same_measurement(one: Layout, other: Layout) -> bool:
    """Whether the shares of two layouts differ too little for a measurement to distinguish them, in as many passes."""
    if len(one.active) != len(other.active) or any(one.passes(i) != other.passes(i) for i in one.active):
        return False
    return all(abs(a - b) <= SAME_SHARE * max(a, b) for a, b in zip(one.shares, other.shares, strict=True))


def is_no_larger(one: Layout, other: Layout) -> bool:
    """Whether one takes no more memory than another on the same devices."""
    if not (one.by_rows and other.by_rows):
        return one == other
    same = one.processes <= other.processes and (one.placement, one.knobs) == (other.placement, other.knobs)
    same = same and one.in_passes <= other.in_passes  # passes take the memory of the gradients between them
    return same and all(a <= b for a, b in zip(one.pass_rows, other.pass_rows, strict=True))
