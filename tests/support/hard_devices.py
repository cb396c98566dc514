"""Families of hard machines that differ in their devices, memory and request.

A family's docstring has the ranges it draws from, and the names of the machine files in
tests/balancer/search/machines that it includes.
"""

from __future__ import annotations

import random

import msgspec

from evener.devices.machine import Sync
from tests.support.hard_curves import knee
from tests.support.machine_drafts import (
    Draft,
    Part,
    flat_to,
    log_uniform,
    redraw,
    room_mib,
    roughen,
    scale,
)


def unequal(chance: random.Random, draft: Draft) -> None:
    """Make one device 5 to 20 times as slow; steps vary by 2 to 6 %."""
    _slow_down(chance.choice(draft.parts), chance.uniform(5, 20))
    roughen(chance, draft)


def useless(chance: random.Random, draft: Draft) -> None:
    """Add a device that is 20 to 70 times as slow.

    On a quarter of the machines, steps are flat at 20 to 200 ms. Includes slow_third_device.
    """
    if chance.random() < 0.25:
        level, knee = log_uniform(chance, 20, 200), round(log_uniform(chance, 32, 128))
        for part in draft.parts:
            flat_to(part, knee, level * chance.uniform(1, 1.5), chance.uniform(0.7, 1.2))
    draft.parts.append(msgspec.structs.replace(draft.parts[0], keys={}))
    _slow_down(draft.parts[-1], log_uniform(chance, 20, 70))


def _slow_down(part: Part, factor: float) -> None:
    part.fixed, part.slope = part.fixed * factor, part.slope * factor
    part.curve = tuple((batch, time * factor) for batch, time in part.curve)


def equal(chance: random.Random, draft: Draft) -> None:
    """Use 2, 4 or 8 devices of one kind."""
    draft.parts = [draft.parts[0]] * chance.choice((2, 4, 8))


def mixed_many(chance: random.Random, draft: Draft) -> None:
    """Use 5 to 8 different devices."""
    redraw(chance, draft, chance.randint(5, 8))


def hosts(chance: random.Random, draft: Draft) -> None:
    """Use 2 to 5 hosts with one or two devices each, 1 to 100 ms apart.

    On a third of the machines all devices are equal. Includes crash_four_hosts.
    """
    hosts, each = chance.randint(2, 5), chance.choice((1, 1, 2))
    redraw(chance, draft, hosts * each)
    if chance.random() < 0.34:
        draft.parts = [msgspec.structs.replace(draft.parts[0], keys={}) for _ in draft.parts]
    for position, part in enumerate(draft.parts):
        part.keys = {"host": "abcde"[position // each]}
    network, more = log_uniform(chance, 1, 100), log_uniform(chance, 0.1, 10)
    draft.sync = Sync(draft.sync.base_ms, draft.sync.per_device_ms, network, more)


def sync_grows(chance: random.Random, draft: Draft) -> None:
    """Use 3 to 6 devices; each further one costs a tenth of the longest step to all of it."""
    redraw(chance, draft, chance.randint(3, 6))
    longest = max(part.fixed + part.slope * part.most for part in draft.parts)
    draft.sync = Sync(draft.sync.base_ms, longest * log_uniform(chance, 0.1, 1))


def sync_base(chance: random.Random, draft: Draft) -> None:
    """Let two or more devices pay a tenth to twice the longest step for synchronization."""
    longest = max(part.fixed + part.slope * part.most for part in draft.parts)
    draft.sync = Sync(longest * log_uniform(chance, 0.1, 2), draft.sync.per_device_ms)


def contention(chance: random.Random, draft: Draft) -> None:
    """Slow devices down by 3 to 80 % while the others work."""
    for part in draft.parts:
        part.keys["contention"] = log_uniform(chance, 0.03, 0.8)


def memory_bend(chance: random.Random, draft: Draft) -> None:
    """Add a workspace of 50 to 300 samples' memory at a third to all of what fits.

    The workspace may or may not fit. Includes workspace.
    """
    for part in draft.parts:
        size, at = (
            part.each_mib * chance.uniform(50, 300),
            max(2, round(part.most * chance.uniform(0.33, 1))),
        )
        need = [(b, part.base_mib + part.each_mib * b) for b in (1, at, at + 1, at + 1 + part.most)]
        (_, _, (_, first), (_, last)) = need
        part.keys["memory_curve"] = (
            *need[:2],
            (at + 1, first + size),
            (at + 1 + part.most, last + size),
        )
        part.keys["memory_mib"] = room_mib(part) + size * chance.choice((0.0, 0.97, 1.1, 1.5))


def small_memory(chance: random.Random, draft: Draft) -> None:
    """Let only 1 to 14 samples fit; includes fourteen_fit."""
    alike, most = chance.random() < 0.7, chance.randint(1, 14)
    for part in draft.parts:
        part.most, part.each_mib = (
            most if alike else chance.randint(1, 14),
            chance.uniform(200, 800),
        )
        part.fixed = part.slope * log_uniform(chance, 40, 300)


def quantum(chance: random.Random, draft: Draft) -> None:
    """Let shares be multiples of 8, 16, 32 or 64, of which 1 to 30 fit.

    A step's fixed part costs 0.5 to 8 multiples.
    """
    draft.ask["quantum"] = quantum = chance.choice((8, 16, 32, 64))
    for part in draft.parts:
        part.most, part.each_mib = (
            round(quantum * log_uniform(chance, 1, 30)),
            chance.uniform(10, 60),
        )
        part.fixed = part.slope * quantum * log_uniform(chance, 0.5, 8)


def passes(overhead: float | None, chance: random.Random, draft: Draft) -> None:
    """Ask for batches beyond memory.

    A further pass costs a step's fixed part, or 0.05 to 0.3 or 1 to 6 times that.
    """
    scale(draft, (10, 300), (0.3, 6), chance)
    draft.modes = ("beyond",)
    for part in draft.parts:
        if overhead is not None:
            part.keys["pass_overhead_ms"] = part.fixed * overhead * chance.uniform(1, 6)


def micro_off(chance: random.Random, draft: Draft) -> None:
    """Allow no passes; one device holds a thirtieth to a half of the others.

    Steps vary by 2 to 6 %.
    """
    roughen(chance, draft)
    draft.ask["micro"], draft.modes = False, ("fixed",)
    small = chance.choice(draft.parts)
    small.most = max(4, round(small.most * log_uniform(chance, 0.03, 0.5)))


def odd_batch(_chance: random.Random, draft: Draft) -> None:
    """Ask for two odd batches."""
    draft.modes = ("odd", "odd too")


def tolerance(tolerance: float, chance: random.Random, draft: Draft) -> None:
    """Ask for a free batch with this tolerance; steps vary by 2 to 6 %."""
    draft.ask["tolerance"], draft.modes = tolerance, ("free",)
    roughen(chance, draft)


def max_batch(chance: random.Random, draft: Draft) -> None:
    """Limit the global batch to a thirtieth to a half of what fits; steps vary by 2 to 6 %."""
    draft.ask["most"] = max(
        8, round(sum(part.most for part in draft.parts) * log_uniform(chance, 0.03, 0.5))
    )
    draft.modes = ("free",)
    roughen(chance, draft)


def slow_start(chance: random.Random, draft: Draft) -> None:
    """Use start times of 0.2, 3, 5 or 12 s, and budgets of 20 to 120 s.

    Three in four machines have a knee at up to 300 ms. Includes flat_then_steep.
    """
    if chance.random() < 0.75:
        knee(chance, draft, 300)
    draft.ask["start"] = chance.choice((0.2, 3.0, 5.0, 5.0, 12.0))
    draft.ask["budget"] = chance.choice(
        [s for s in (20.0, 30.0, 60.0, 60.0, 120.0) if s >= 5 * draft.ask["start"]] or [120.0]
    )
