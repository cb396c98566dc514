"""Simulated machines that several tests search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.devices.machine import Machine
from evener.devices.simulated import parse_machine

CARD = """
[[device]]
name = "{name}"
memory_mib = 142336
memory_base_mib = 2130.0
memory_per_sample_mib = 8.6
noise = 0.005
curve = {curve}
"""


def crawling_machine(beyond: int = 1400) -> Machine:
    """Return two equal fast GPUs, of which the first takes eight times as long above
    `beyond` rows.
    """
    return parse_machine(crawling_machine_toml(beyond).encode())


def crawling_machine_toml(beyond: int = 1400) -> str:
    """Return that machine's file: 5 ms + 0.032 ms per row (1,400 rows 49.8 ms).

    All of 8,192 rows fit in memory.
    """
    steep = [
        [1, _ms(1)],
        [beyond, _ms(beyond)],
        [beyond + 100, 8 * _ms(beyond + 100)],
        [16384, 8 * _ms(16384)],
    ]
    straight = [[1, _ms(1)], [16384, _ms(16384)]]
    sync = "[sync]\nbase_ms = 1.2\nper_device_ms = 1.0\n"
    return (
        sync
        + CARD.format(name="Crawling", curve=steep)
        + CARD.format(name="Healthy", curve=straight)
    )


def _ms(rows: int) -> float:
    return round(5 + 0.032 * rows, 3)


def step_seconds(machine: Machine, shares: Sequence[int], micro: Sequence[int] = ()) -> float:
    """Return the time of one synchronous step without noise.

    That is the slowest device's time and, with 2 or more devices, the time to synchronize them.
    `micro` has the rows of each device's largest pass; empty: each share is one pass.
    """
    active = [position for position, share in enumerate(shares) if share > 0]
    passes = [
        -(-share // rows) if share else 0
        for share, rows in zip(shares, micro or shares, strict=True)
    ]
    together = len(active) > 1
    parts = (
        machine.device_seconds(position, shares[position], together, passes[position])
        for position in active
    )
    return max(parts, default=0.0) + machine.sync_seconds(active)


def samples_per_second(machine: Machine, shares: Sequence[int], micro: Sequence[int] = ()) -> float:
    """Return the combined throughput without noise.

    It is 0 if no device has samples, and infinite if a step takes no time.
    """
    total = sum(shares)
    seconds = step_seconds(machine, shares, micro)
    if seconds > 0:
        return total / seconds
    return math.inf if total else 0.0
