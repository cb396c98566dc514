"""Families of hard machines that differ in their noise and events.

A family's docstring has the ranges it draws from, and the names of the machine files in
tests/balancer/search/machines that it includes.
"""

from __future__ import annotations

import random
from typing import Any

from evener.devices.machine import SimulatedEvent
from tests.support.machine_drafts import Draft, redraw, scale


def noisy(chance: random.Random, draft: Draft) -> None:
    """Let steps vary by 5 to 15 %."""
    for part in draft.parts:
        part.noise = chance.uniform(0.05, 0.15)


def noisy_slow(chance: random.Random, draft: Draft) -> None:
    """Let steps vary by 5 to 15 %, with fixed times of 0.2 to 2 s and 1 to 10 ms per sample."""
    scale(draft, (200, 2000), (1, 10), chance)
    noisy(chance, draft)


def bursts(chance: random.Random, draft: Draft) -> None:
    """Slow a device by 10 to 60 % for about 0.5 to 2 s, every 4 to 12 s in the first minute."""
    at = chance.uniform(0, 5)
    while at < 60:
        _event(chance, draft, at, chance.uniform(0.5, 2.5), slowed=chance.uniform(0.1, 0.6))
        at += chance.uniform(4, 12)


def lost(chance: random.Random, draft: Draft) -> None:
    """Lose the slowest of three devices after 9 to 17 s; the others differ by up to a fifth.

    Includes lost_in_race.
    """
    redraw(chance, draft, 3)
    first, second, third = draft.parts
    second.fixed, second.slope = first.fixed, first.slope * chance.uniform(1, 1.2)
    third.fixed, third.slope = first.fixed * 1.2, second.slope * chance.uniform(1.1, 1.6)
    for part in draft.parts:
        part.noise = 0.003  # a race of few turns
    draft.events.append(SimulatedEvent(at_seconds=chance.uniform(9, 17), device=2, lost=True))


def throttle(chance: random.Random, draft: Draft) -> None:
    """Slow one device permanently by 10 to 50 % after 2 to 25 s.

    Includes throttled_before_check.
    """
    _event(chance, draft, chance.uniform(2, 25), slowed=chance.uniform(0.1, 0.5))


def neighbour(chance: random.Random, draft: Draft) -> None:
    """Slow one device by 10 to 40 % for 5 to 20 s, after 2 to 15 s.

    Includes neighbour_during_splits.
    """
    _event(
        chance, draft, chance.uniform(2, 15), chance.uniform(5, 20), slowed=chance.uniform(0.1, 0.4)
    )


def memory_held(chance: random.Random, draft: Draft) -> None:
    """Take 20 to 90 % of a device's memory for samples permanently, at once or after 2 to 20 s."""
    _hold(chance, draft, 1e9)


def memory_held_gone(chance: random.Random, draft: Draft) -> None:
    """Take a device's memory as in `memory_held`, but only for 3 to 15 s."""
    _hold(chance, draft, chance.uniform(3, 15))


def _hold(chance: random.Random, draft: Draft, seconds: float) -> None:
    position = chance.randrange(len(draft.parts))
    part = draft.parts[position]
    taken = part.each_mib * part.most * chance.uniform(0.2, 0.9)
    at = chance.choice((0.0, chance.uniform(2, 20)))
    draft.events.append(
        SimulatedEvent(
            at_seconds=at, until_seconds=at + seconds, device=position, memory_taken_mib=taken
        )
    )


def _event(
    chance: random.Random, draft: Draft, at: float, seconds: float = 1e9, **keys: Any
) -> None:
    position = chance.randrange(len(draft.parts))
    draft.events.append(
        SimulatedEvent(at_seconds=at, until_seconds=at + seconds, device=position, **keys)
    )
