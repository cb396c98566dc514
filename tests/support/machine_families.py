"""Random machines by family and seed, whose true times and memory are known, to compare searches
on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from evener.devices.machine import Machine, SimulatedDevice, Sync

SIZES = (2, 4, 8, 16)
NOISES = (0.002, 0.01, 0.03)
FIXED = (64, 128, 256, 512, 1024, 2048, 4096)
BEYOND = (0.5, 4.0)  # smallest and largest fixed batch, as a multiple of what fits at once
CURVE_TO = 8192  # samples: the last point of a straight curve


class Draw(msgspec.Struct):
    """One device's parameters before they become a machine file's keys."""

    fixed_ms: float
    slope_ms: float  # per sample
    most: int  # the largest batch that fits, in samples
    knee: int = 0
    stall_ms: float = 0.0
    contention: float = 0.0
    bend: float = 1.0  # memory per sample beyond half of `most`, as a multiple of that before
    # of each further pass; None: a pass takes as long as a step with its rows
    overhead_ms: float | None = None


def machine(family: str, devices: int, noise: float, seed: int) -> Machine:
    """Return a family's machine; a seed gives the same devices at every noise."""
    rng = random.Random(f"{family}/{devices}/{seed}")
    draws = [_draw(rng) for _ in range(devices)]
    sync = Sync(_log(rng, 0.5, 20.0), _log(rng, 0.2, 10.0) * 2 / devices)
    draws, sync = FAMILIES[family](rng, draws, sync)
    memory = [(rng.uniform(400, 2500), _log(rng, 1.0, 20.0)) for _ in draws]
    if family == "identical":
        memory = [memory[0]] * devices
    parts = zip(draws, memory, strict=True)
    return Machine(
        tuple(_device(i, d, base, each, noise) for i, (d, (base, each)) in enumerate(parts)), sync
    )


def fixed_batch(machine: Machine, seed: int) -> int:
    """Return a fixed global batch of a usual size that fits."""
    rng = random.Random(f"fixed/{seed}")
    most = sum(largest(machine, i) for i in range(len(machine.devices)))
    fit = [batch for batch in FIXED if len(machine.devices) <= batch <= 0.9 * most]
    return rng.choice(fit) if fit else max(len(machine.devices), int(0.9 * most))


def batch_beyond(machine: Machine, seed: int) -> int:
    """Return a fixed global batch of half to four times what fits at once."""
    rng = random.Random(f"beyond/{seed}")
    most = sum(largest(machine, i) for i in range(len(machine.devices)))
    return max(len(machine.devices), round(most * _log(rng, *BEYOND)))


def largest(machine: Machine, position: int) -> int:
    """Return the largest batch that fits on a device, by bisection."""
    low, high = 0, 1 << 20
    limit = machine.usable_memory_bytes(position)
    while high - low > 1:
        middle = (low + high) // 2
        if machine.memory_bytes(position, middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def _log(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _draw(rng: random.Random) -> Draw:
    slope = _log(rng, 0.15, 1.2)
    return Draw(slope * _log(rng, 5, 150), slope, round(_log(rng, 150, 4000)))


Made = tuple[list[Draw], Sync]


def _affine(_rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    return draws, sync


def _flat(rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    for draw in draws:
        draw.knee = round(draw.most * rng.uniform(0.05, 0.5))
    return draws, sync


def _stairs(rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    for draw in draws:
        draw.stall_ms = (draw.fixed_ms + draw.slope_ms * draw.most) / rng.uniform(5, 20)
    return draws, sync


def _fast_small(rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    fast = rng.choice(draws)
    fast.slope_ms = min(d.slope_ms for d in draws) / rng.uniform(2, 4)
    fast.fixed_ms = fast.slope_ms * rng.uniform(5, 50)
    fast.most = max(48, round(min(d.most for d in draws) / rng.uniform(2, 5)))
    return draws, sync


def _straggler(rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    slow = rng.choice(draws)
    slow.slope_ms = 10 * max(d.slope_ms for d in draws)
    slow.fixed_ms *= 10
    return draws, sync


def _contention(rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    for draw in draws:
        draw.contention = rng.uniform(0.03, 0.3)
    return draws, sync


def _dear_sync(rng: random.Random, draws: list[Draw], _sync: Sync) -> Made:
    slowest = max(d.fixed_ms + d.slope_ms * d.most for d in draws)
    return draws, Sync(
        slowest * (len(draws) - 1) * rng.uniform(0.8, 2.0), slowest * rng.uniform(0.0, 0.1)
    )


def _bent_memory(rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    for draw in draws:
        draw.bend = rng.uniform(1.1, 1.8)
    return draws, sync


def _small_card(rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    """One card has less memory than its speed could use, and further passes cost less
    than steps.
    """
    for draw in draws:
        draw.overhead_ms = (draw.fixed_ms + draw.slope_ms * draw.most) * _log(rng, 0.001, 0.05)
    small = rng.choice(draws)
    small.most = max(48, round(small.most / rng.uniform(2, 12)))
    return draws, sync


def _identical(_rng: random.Random, draws: list[Draw], sync: Sync) -> Made:
    return [draws[0]] * len(draws), sync


FAMILIES: dict[str, Callable[[random.Random, list[Draw], Sync], Made]] = {
    "affine": _affine,
    "flat, then linear": _flat,
    "stairs": _stairs,
    "fast, little memory": _fast_small,
    "straggler, 10 x": _straggler,
    "contention": _contention,
    "dear sync": _dear_sync,
    "bent memory": _bent_memory,
    "small card": _small_card,
    "identical": _identical,
}


def _device(
    position: int, draw: Draw, base_mib: float, each_mib: float, noise: float
) -> SimulatedDevice:
    far = (CURVE_TO, draw.fixed_ms + draw.slope_ms * CURVE_TO)
    level = draw.fixed_ms + draw.slope_ms * (draw.knee or 1)
    flat = ((1, level), (draw.knee, level)) if draw.knee else ((1, level),)
    half = max(2, draw.most // 2)
    need = base_mib + each_mib * half + each_mib * draw.bend * (draw.most - half)
    bent = ((1, base_mib + each_mib), (half, base_mib + each_mib * half), (draw.most, need))
    straight = draw.bend == 1.0
    return SimulatedDevice(
        name=f"device {position}",
        memory_mib=need + each_mib * 0.4,
        memory_base_mib=base_mib if straight else 0.0,
        memory_per_sample_mib=each_mib if straight else 0.0,
        memory_curve=() if straight else bent,
        noise=noise,
        curve=(*flat, far),
        stall_ms=draw.stall_ms,
        contention=draw.contention,
        pass_overhead_ms=draw.overhead_ms,
    )
