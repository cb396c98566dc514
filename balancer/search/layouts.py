"""The ways to lay a job on the devices, as candidates of one race. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.balancer.types import Layout, solo
from evener.shares import even

Family = Literal["solo", "even", "split", "pack", "place"]
FAMILIES: tuple[Family, ...] = ("solo", "even", "split", "pack", "place")
PackMode = Literal["", "logical", "mps"]
Knob = Literal["xla", "mixed"]
RETREAT = 0.7  # of a batch that ran out of memory in the race
SIMPLEST_FIRST: tuple[Family, ...] = ("solo", "even", "split", "place", "pack")


class Placement(msgspec.Struct, frozen=True):
    """A workload's own way to lay its parts on devices."""

    name: str
    devices: int = 2  # most that it uses


class Wanted(msgspec.Struct, frozen=True):
    """What a comparison is asked to measure."""

    families: tuple[Family, ...] = FAMILIES
    placements: tuple[Placement, ...] = ()
    pack_modes: tuple[PackMode, ...] = ("",)  # "": plain processes; logical: equal parts of the memory; mps: a daemon
    knobs: tuple[Knob, ...] = ()  # measured as rivals of the winner
    left_out: tuple[str, ...] = ()  # what was asked for and can't be had here, in sentences


class Candidate(msgspec.Struct, frozen=True):
    """One layout in the race; an extra one is a second try of its family, which a short budget does without."""

    family: Family
    layout: Layout
    extra: bool = False

    @property
    def simplicity(self) -> tuple[int, int, int, int]:
        """For a tie: the smaller is the simpler to live with."""
        layout = self.layout
        return (len(layout.knobs), SIMPLEST_FIRST.index(self.family), len(layout.active), layout.processes)


def alone(devices: int, position: int, batch: int) -> Candidate:
    """One device with the whole batch."""
    return Candidate("solo", solo(devices, position, batch))


def device_counts(devices: int) -> tuple[int, ...]:
    """2, 4, 8, ... and all of them: how many devices an even split is measured on."""
    counts, count = [], 2
    while count < devices:
        counts.append(count)
        count *= 2
    return (*counts, devices) if devices > 1 else ()


def evenly(devices: int, positions: tuple[int, ...], batch: int, quantum: int = 1) -> Candidate | None:
    """The batch spread evenly over some devices, in whole quanta; None if it has too few for them."""
    if batch // quantum < len(positions) or batch % quantum:
        return None
    parts = even(batch // quantum, len(positions))
    shares = [0] * devices
    for position, part in zip(positions, parts, strict=True):
        shares[position] = part * quantum
    return Candidate("even", Layout("split", tuple(shares)))


def packed(of: Layout, processes: int, mode: PackMode = "", batch: int | None = None) -> Candidate:
    """So many trainings side by side on the device of a solo layout, each with its batch unless said."""
    (position,) = of.active
    size = of.global_batch if batch is None else batch
    shares = tuple(size if i == position else 0 for i in range(len(of.shares)))
    return Candidate("pack", Layout("pack", shares, processes, mode))


def placed(devices: int, placement: Placement, batch: int) -> Candidate | None:
    """The model's parts on the first devices; the shares only say who takes part. None if there are too few."""
    used = min(devices, placement.devices)
    if used < 2 or batch < used:
        return None
    shares = (*even(batch, used), *[0] * (devices - used))
    return Candidate("place", Layout("place", shares, placement=placement.name))


def smaller(layout: Layout, quantum: int = 1) -> Layout | None:
    """The layout with a smaller batch everywhere, after it ran out of memory; None if it can't shrink."""
    shares = tuple(int(share * RETREAT) // quantum * quantum for share in layout.shares)
    if any(before and not now for before, now in zip(layout.shares, shares, strict=True)):
        return None
    return msgspec.structs.replace(layout, shares=shares)
