"""The oracle that judges searches, compared with every layout of small machines."""

from __future__ import annotations

import random
from itertools import product

import pytest

from evener.devices.machine import Machine, SimulatedDevice, SimulatedEvent, Sync
from tests.support import search_oracle as oracle
from tests.support.machine_families import largest

EVENTS: tuple[dict[str, float], ...] = ({"lost": True}, {"slowed": 0.4}, {"memory_taken_mib": 4.0})


def _machine(chance: random.Random) -> Machine:
    """Return one to three devices on two hosts.

    A larger share may take less time, and one event may happen.
    """
    falls = chance.choice([0.0, -2.0])
    devices = tuple(_device(chance, falls) for _ in range(chance.randint(1, 3)))
    sync = Sync(chance.uniform(0, 2), chance.uniform(0, 1), chance.uniform(0, 5), 0.5)
    event = SimulatedEvent(
        at_seconds=1.0,
        device=chance.randrange(len(devices)),
        **chance.choice(EVENTS),  # type: ignore[arg-type]
    )
    return Machine(devices, sync, events=(event,))


def _device(chance: random.Random, falls: float) -> SimulatedDevice:
    curve, batch = [(1, chance.uniform(3, 9))], 1
    for _ in range(3):
        batch += chance.randint(1, 6)
        curve.append((batch, max(0.5, curve[-1][1] + chance.uniform(falls, 4))))
    return SimulatedDevice(
        name="a",
        memory_mib=100 + chance.randint(3, 12),
        memory_base_mib=100,
        memory_per_sample_mib=1,
        curve=tuple(curve),
        host=chance.choice("ab"),
        contention=chance.choice([0, 0.2]),
        stall_ms=chance.choice([0, 0, 2.0]),
        pass_overhead_ms=chance.choice([None, 0.5]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_the_best_of_all_layouts(seed: int) -> None:
    chance = random.Random(seed)
    machine, at = _machine(chance), chance.choice([0.0, 2.0])
    quantum, batch, micro = (
        chance.choice([1, 2]),
        chance.choice([4, 6, 8]),
        chance.choice([True, False]),
    )
    most = [largest(machine, i) for i in range(len(machine.devices))]
    some = (shares for shares in product(*(range(0, n + 1, quantum) for n in most)) if any(shares))
    best = max((oracle.true_rate(machine, shares, (), at) for shares in some), default=0.0)
    assert oracle.free(machine, 0.0, quantum, at=at).samples_per_second == pytest.approx(best)
    best = 0.0
    for shares in product(range(0, batch + 1, quantum), repeat=len(most)):
        if sum(shares) == batch:
            rows = (range(1, share + 1) if share and micro else [share] for share in shares)
            fit = (
                one
                for one in product(*rows)
                if all(n <= limit for n, limit in zip(one, most, strict=True))
            )
            best = max([best, *(oracle.true_rate(machine, shares, one, at) for one in fit)])
    assert oracle.fixed(machine, batch, micro, quantum, at).samples_per_second == pytest.approx(
        best
    )
