"""Families of hard machines by their noise and by the events on them.

Each first line has its ranges, and the files of tests/balancer/search/machines that they include.
"""

from __future__ import annotations

import random
from typing import Any

from evener.devices.machine import SimulatedEvent
from tests.support.machine_drafts import Draft, redraw, scale


def noisy(chance: random.Random, draft: Draft) -> None:
    """Steps vary by 5 to 15 %."""
    for part in draft.parts:
        part.noise = chance.uniform(0.05, 0.15)


def noisy_slow(chance: random.Random, draft: Draft) -> None:
    """The same, and steps of 0.2 to 2 s and 1 to 10 ms a sample."""
    scale(draft, (200, 2000), (1, 10), chance)
    noisy(chance, draft)


def bursts(chance: random.Random, draft: Draft) -> None:
    """For the first 60 s, every 4 to 12 s somebody takes 10 to 60 % of a device for 0.5 to 2 s."""
    at = chance.uniform(0, 5)
    while at < 60:
        _event(chance, draft, at, chance.uniform(0.5, 2.5), slowed=chance.uniform(0.1, 0.6))
        at += chance.uniform(4, 12)


def lost(chance: random.Random, draft: Draft) -> None:
    """The slowest of three is lost after 9 to 17 s; the others differ by up to a fifth:
    lost_in_race.
    """
    redraw(chance, draft, 3)
    first, second, third = draft.parts
    second.fixed, second.slope = first.fixed, first.slope * chance.uniform(1, 1.2)
    third.fixed, third.slope = first.fixed * 1.2, second.slope * chance.uniform(1.1, 1.6)
    for part in draft.parts:
        part.noise = 0.003  # a race of few turns
    draft.events.append(SimulatedEvent(at_seconds=chance.uniform(9, 17), device=2, lost=True))


def throttle(chance: random.Random, draft: Draft) -> None:
    """One device is 10 to 50 % slower for good, after 2 to 25 s: throttled_before_check."""
    _event(chance, draft, chance.uniform(2, 25), slowed=chance.uniform(0.1, 0.5))


def neighbour(chance: random.Random, draft: Draft) -> None:
    """One device is 10 to 40 % slower for 5 to 20 s, after 2 to 15 s: neighbour_during_splits."""
    _event(
        chance, draft, chance.uniform(2, 15), chance.uniform(5, 20), slowed=chance.uniform(0.1, 0.4)
    )


def memory_held(chance: random.Random, draft: Draft) -> None:
    """Somebody takes 20 to 90 % of a device's memory for samples for good, from the start or after
    2 to 20 s.
    """
    _hold(chance, draft, 1e9)


def memory_held_gone(chance: random.Random, draft: Draft) -> None:
    """The same for 3 to 15 s."""
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
