"""Simulated machines with power, and the most samples per joule that their physics allow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import msgspec

from evener.balancer.search.search import Search
from evener.balancer.types import Layout, Problem
from evener.devices.machine import Machine
from tests.support import machine_families as machines
from tests.support.machines import samples_per_second, step_seconds
from tests.support.recording_prober import RecordingProber, run_search

FAMILIES = ("affine", "flat, then linear", "straggler, 10 x", "contention")
UNSURE = 0.02  # relative, of samples/s: noise may put a layout within the slowdown or outside
ENOUGH = 0.99  # relative to the most samples per joule
SLOWDOWNS = (0.1, 0.3, 0.7)


def is_efficient(seed: int) -> bool:
    """Return whether the search chooses one of the most efficient layouts within the slowdown.

    The machine is random.
    """
    rng = random.Random(seed)
    machine = machines.machine(rng.choice(FAMILIES), rng.choice((2, 2, 3, 4)), 0.005, seed)
    power = (
        msgspec.structs.replace(one, power_watts=rng.uniform(60, 700)) for one in machine.devices
    )
    machine = msgspec.structs.replace(machine, devices=tuple(power))
    batch, slowdown, free = (
        machines.fixed_batch(machine, seed),
        rng.choice(SLOWDOWNS),
        rng.random() < 0.3,
    )
    memory = tuple(machine.usable_memory_bytes(i) for i in range(len(machine.devices)))
    problem = Problem(
        len(memory),
        memory,
        global_batch=None if free else batch,
        objective="samples-per-joule",
        max_slowdown=slowdown,
        micro=False,
    )
    found = run_search(Search(problem), RecordingProber(machine, seed).measure).best()
    assert found is not None
    batches = sorted({batch, found.layout.global_batch}) if free else [batch]
    return _is_best(machine, found.layout, batches, slowdown)


def _is_best(machine: Machine, chosen: Layout, batches: list[int], slowdown: float) -> bool:
    rivals = [*(shares for batch in batches for shares in _balanced(machine, batch)), chosen.shares]
    fastest = max(samples_per_second(machine, one) for one in rivals)
    within = [
        one
        for one in rivals
        if samples_per_second(machine, one) >= fastest * (1 - slowdown) * (1 + UNSURE)
    ]
    best = max((_samples_per_joule(machine, one) for one in within), default=0.0)
    fast_enough = samples_per_second(machine, chosen.shares) >= fastest * (1 - slowdown) * (
        1 - UNSURE
    )
    return fast_enough and _samples_per_joule(machine, chosen.shares) >= ENOUGH * best


def _balanced(machine: Machine, batch: int) -> Iterator[tuple[int, ...]]:
    """Yield the fastest shares of a batch on each set of devices that can hold it."""
    positions = range(len(machine.devices))
    for count in range(1, len(positions) + 1):
        for active in combinations(positions, count):
            if shares := _fastest(machine, active, batch):
                yield shares


def _fastest(machine: Machine, active: tuple[int, ...], batch: int) -> tuple[int, ...] | None:
    def fitting(seconds: float) -> list[int]:
        return [
            _most_within(machine, i, seconds, len(active) > 1) if i in active else 0
            for i in range(len(largest_batches))
        ]

    largest_batches = [machines.largest(machine, i) for i in range(len(machine.devices))]
    low, high = 0.0, max(machine.device_seconds(i, largest_batches[i], True) for i in active)
    if sum(fitting(high)) < batch:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(fitting(middle)) >= batch else (middle, high)
    shares = fitting(high)
    for i in sorted(active, key=lambda i: -shares[i]):
        shares[i] -= min(sum(shares) - batch, shares[i] - 1)
    return tuple(shares) if all(shares[i] for i in active) and sum(shares) == batch else None


def _most_within(machine: Machine, position: int, seconds: float, together: bool) -> int:
    low, high = 0, machines.largest(machine, position) + 1
    while high - low > 1:
        middle = (low + high) // 2
        inside = machine.device_seconds(position, middle, together) <= seconds
        low, high = (middle, high) if inside else (low, middle)
    return low


def _samples_per_joule(machine: Machine, shares: tuple[int, ...]) -> float:
    step, together = step_seconds(machine, shares), sum(map(bool, shares)) > 1
    watts = 0.0
    for i, (device, share) in enumerate(zip(machine.devices, shares, strict=True)):
        busy = machine.device_seconds(i, share, together) / step if share else 0.0
        watts += device.watts(min(1.0, busy), share / step)
    return sum(shares) / step / watts
