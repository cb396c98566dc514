"""Comparisons on simulated machines with known best layouts, and scores for each verdict.

Each machine is one of the search's families (machine_families), with a curve of the gain of packing
and two placements. The truth shares no code with the search: the exact best split and single device
come from search_oracle, the best pack (on the device that is fastest alone) and the best placement
from trying all of them on the noiseless physics. A verdict is right if the family that it names can
truly have at least 99 % of the best throughput. It is reached if the layout that it names, with its
batches, truly has that.
"""

from __future__ import annotations

import random
import threading

import msgspec

from evener.balancer.families import Placement
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.packing import MOST_PROCESSES
from evener.balancer.search.search import Search
from evener.balancer.types import Layout, Problem
from evener.devices.machine import Machine, SimulatedPlacement, interpolate
from tests.support import machine_families, search_oracle
from tests.support.machines import samples_per_second

NOISES = (0.002, 0.01, 0.03)
FAMILIES = tuple(machine_families.FAMILIES)
RIGHT = 0.99  # relative to the true best throughput
PLACEMENT_BATCHES = (1, 4096)


class ComparisonCase(msgspec.Struct, frozen=True):
    """A machine and a request."""

    name: str
    machine: Machine
    global_batch: int | None
    seed: int

    @property
    def problem(self) -> Problem:
        """The problem that the search gets."""
        machine = self.machine
        return Problem(
            devices=len(machine.devices),
            memory_bytes=tuple(machine.usable_memory_bytes(i) for i in range(len(machine.devices))),
            global_batch=self.global_batch,
            tolerance=0.0,
        )


class Score(msgspec.Struct, frozen=True):
    """A comparison of one verdict with the truth."""

    case: ComparisonCase
    named: str  # the family that the verdict names
    named_part: float  # the most that this family can truly have, divided by the best
    reached_part: float  # what the named layout truly has, divided by the best
    truth: str  # the family that is truly best
    probes: int
    seconds: float  # virtual seconds

    @property
    def right(self) -> bool:
        """True if the verdict names the true winner, or a layout within 1 % of it."""
        return self.named_part >= RIGHT


def make_case(seed: int) -> ComparisonCase:
    """Return the machine of a seed. Every second one has a fixed global batch."""
    rng = random.Random(f"compare/{seed}")
    family, devices, noise = rng.choice(FAMILIES), rng.choice((1, 2, 2, 4)), rng.choice(NOISES)
    machine = machine_families.machine(family, devices, noise, seed)
    gain = _gain(rng)
    parts = tuple(msgspec.structs.replace(device, pack_gain=gain) for device in machine.devices)
    placements = _placements(rng, machine) if devices > 1 else ()
    machine = msgspec.structs.replace(machine, devices=parts, placements=placements)
    batch = machine_families.fixed_batch(machine, seed) if seed % 2 else None
    return ComparisonCase(f"{family}, {devices} devices, noise {noise:.1%}", machine, batch, seed)


def compare(case: ComparisonCase) -> tuple[Search, int, float]:
    """Run a comparison to its end, and return it with its number of probes and virtual seconds."""
    wanted = LayoutOptions(
        placements=tuple(Placement(p.name, p.devices) for p in case.machine.placements)
    )
    comparison = Search(case.problem, wanted)
    prober = SimulatedProber(case.machine, case.seed)
    probes = 0
    while asked := comparison.ask():
        for seen in prober.measure(asked, lambda _: None, threading.Event()):
            comparison.tell(seen)
            probes += 1
    return comparison, probes, prober.now()


def score(case: ComparisonCase) -> Score:
    """Run one machine and compare its verdict with the truth."""
    comparison, probes, seconds = compare(case)
    truths = truth(case, comparison.evaluation.offers.view.common_batch)
    best = max(truths, key=lambda name: truths[name])
    standing = comparison.evaluation.ranking()[0]
    layout = standing.candidate.layout
    reached = true_throughput(case.machine, layout)
    family = "split" if standing.candidate.family.name == "even" else standing.candidate.family.name
    able = reached if family == "place" else truths[family]  # one placement isn't the other
    return Score(case, family, able / truths[best], reached / truths[best], best, probes, seconds)


def truth(case: ComparisonCase, common: int | None) -> dict[str, float]:
    """Return the highest true samples/s of each family that the machine has.

    Placements have the `common` batch.
    """
    machine, batch = case.machine, case.global_batch
    oracle = search_oracle.fixed(machine, batch) if batch else search_oracle.free(machine, 0.0)
    found = {"solo": _best_single(machine, batch), "pack": _best_pack(machine, batch)}
    if len(machine.devices) > 1:
        found["split"] = oracle.samples_per_second
        if common:
            found["place"] = max(
                common / placement.seconds(common) for placement in machine.placements
            )
    return found


def true_throughput(machine: Machine, layout: Layout) -> float:
    """Return a layout's samples/s without noise."""
    if layout.kind == "place":
        placement = machine.placement(layout.placement)
        return layout.global_batch / placement.seconds(layout.global_batch) if placement else 0.0
    if layout.kind == "pack":
        (position,) = layout.active
        return _pack_rate(machine, position, layout.global_batch, layout.processes)
    return samples_per_second(machine, layout.shares, layout.micro)


def _gain(rng: random.Random) -> tuple[tuple[int, float], ...]:
    """Return the gain of packing: none, a loss, or a rise to a peak and a slow fall after it."""
    if rng.random() < 0.3:
        return ((1, 1.0), (2, rng.uniform(0.85, 1.0)), (MOST_PROCESSES, rng.uniform(0.6, 0.85)))
    peak, top = rng.choice((2, 3, 4, 6, 9, 12)), rng.uniform(1.03, 2.5)
    middle = max(2, peak // 2)
    rise = ((middle, 1 + (top - 1) * rng.uniform(0.5, 0.9)),) if middle < peak else ()
    return ((1, 1.0), *rise, (peak, top), (MOST_PROCESSES, top * rng.uniform(0.6, 0.95)))


def _placements(rng: random.Random, machine: Machine) -> tuple[SimulatedPlacement, ...]:
    """Return two placements, from 40 % slower to 60 % faster than the fastest device alone.

    They are slower at small batches.
    """
    low, high = PLACEMENT_BATCHES
    found = []
    for name in ("towers", "alternate"):
        factor, extra = rng.uniform(0.62, 1.4), rng.uniform(0.0, 10.0)
        curve = tuple(
            (
                batch,
                min(max(0.01, interpolate(device.curve, batch)) for device in machine.devices)
                * factor
                + extra,
            )
            for batch in (low, 64, 256, 1024, high)
        )
        found.append(SimulatedPlacement(name=name, curve=curve))
    return tuple(found)


def _fits(machine: Machine, position: int, batch: int, processes: int = 1) -> bool:
    return processes * machine.memory_bytes(position, batch) <= machine.usable_memory_bytes(
        position
    )


def _best_single(machine: Machine, batch: int | None) -> float:
    return max((_single(machine, i, batch)[0] for i in range(len(machine.devices))), default=0.0)


def _single(machine: Machine, position: int, batch: int | None) -> tuple[float, int]:
    """Return (samples/s, batch) of one device alone at its best batch."""
    sizes = [batch] if batch else range(1, machine_families.largest(machine, position) + 1)
    rates = [
        (size / machine.device_seconds(position, size, False), size)
        for size in sizes
        if _fits(machine, position, size)
    ]
    return max(rates, default=(0.0, 0))


def _pack_rate(machine: Machine, position: int, batch: int, processes: int) -> float:
    return batch * processes / machine.pack_seconds(position, batch, processes)


def _best_pack(machine: Machine, batch: int | None) -> float:
    """Return the best samples/s of any number of trainings and batch, on the fastest device."""
    best, position = (
        0.0,
        max(range(len(machine.devices)), key=lambda i: _single(machine, i, batch)[0]),
    )
    for processes in range(2, MOST_PROCESSES + 1):
        top = batch or _largest_within(
            machine, position, machine.usable_memory_bytes(position) / processes
        )
        if top and _fits(machine, position, top, processes):
            best = max(best, _pack_rate(machine, position, top, processes))
    return best


def _largest_within(machine: Machine, position: int, room_bytes: float) -> int:
    low, high = 0, machine_families.largest(machine, position) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high)
            if machine.memory_bytes(position, middle) <= room_bytes
            else (low, middle)
        )
    return low
