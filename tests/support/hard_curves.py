"""Families of hard machines that differ in their step times.

A family's docstring has the ranges it draws from, and the names of the machine files in
tests/balancer/search/machines that it includes.
"""

from __future__ import annotations

import random

from evener.devices.machine import Sync
from tests.support.machine_drafts import (
    CURVED,
    FAR,
    Draft,
    flat_to,
    line_points,
    log_uniform,
    redraw,
    roughen,
    scale,
)

JAGS = (
    1,
    2,
    5,
    9,
    16,
    24,
    33,
    48,
    64,
    96,
    128,
    160,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    4096,
    FAR,
)  # samples at which a jagged curve bends


def default(_chance: random.Random, _draft: Draft) -> None:
    """Change nothing."""


def waves(width: int, chance: random.Random, draft: Draft) -> None:
    """Add 0.2 to 1.4 ms per sample in steps of `width` samples.

    Includes waves and stairs_as_contention.
    """
    rise, lean = width * log_uniform(chance, 0.2, 1.4), chance.uniform(0, 0.02)
    base = chance.choice((0.0, log_uniform(chance, 5, 50), log_uniform(chance, 5, 50)))
    for part in draft.parts:
        part.most, slower = round(log_uniform(chance, 60 + width, 1000)), chance.uniform(0.6, 1.2)
        ends = [(n + 1, n * width + at) for n in range(part.most // width + 3) for at in (1, width)]
        part.curve = tuple(
            (b, slower * (base + rise * (n + (lean if b % width == 0 else 0)))) for n, b in ends
        )


def kernel(sign: int, chance: random.Random, draft: Draft) -> None:
    """Use another kernel above 32 to 256 samples, 3 to 10 % slower or 8 to 30 % faster.

    Includes kernel_switch.
    """
    last, jump = (
        chance.choice((32, 64, 64, 128, 256)),
        1 + (chance.uniform(0.03, 0.1) if sign > 0 else chance.uniform(0.08, 0.3)),
    )
    factor = jump if sign > 0 else 1 / jump
    for part in draft.parts:
        part.most = round(log_uniform(chance, 1.2 * last, 3000))
        (b0, t0), (b1, t1), (b2, t2), (b3, t3) = line_points(part, (1, last, last + 1, FAR))
        part.curve = ((b0, t0), (b1, t1), (b2, t2 * factor), (b3, t3 * factor))


def falling(chance: random.Random, draft: Draft) -> None:
    """Make the slope 1.15 to 1.9 times as steep above 24 to 800 samples.

    Half of the machines also have a jump of 3 to 15 % there. They have 1 to 3 devices; the card of
    falling_samples, whose slope becomes 2.5 times as steep, is included.
    """
    draft.modes = ("free",)
    redraw(chance, draft, chance.randint(1, 3))
    at, steeper, fixed = (
        round(log_uniform(chance, 24, 800)),
        chance.uniform(1.15, 1.9),
        log_uniform(chance, 2, 20),
    )
    jump = chance.choice((0.0, chance.uniform(0.03, 0.15)))
    for part in draft.parts:
        part.most, part.fixed = round(at * chance.uniform(1.5, 6)), part.slope * fixed
        (b0, t0), (b1, t1) = line_points(part, (1, at))
        after = t1 * (1 + jump) + part.slope * steeper
        part.curve = (
            (b0, t0),
            (b1, t1),
            (at + 1, after),
            (FAR, after + part.slope * steeper * (FAR - at - 1)),
        )


def falling_fixed(chance: random.Random, draft: Draft) -> None:
    """Use the machines of `falling` with a fixed batch.

    Two passes may train such a batch faster than one.
    """
    falling(chance, draft)
    draft.modes = ("fixed",)


def convex(chance: random.Random, draft: Draft) -> None:
    """Raise the batch to the power 1.02 to 1.1, so that each further sample costs more."""
    _power(chance.uniform(1.02, 1.1), draft)


def concave(chance: random.Random, draft: Draft) -> None:
    """Raise the batch to the power 0.6 to 0.9, so that samples/s rise to the end.

    The other devices hold a twentieth to a half. Includes rest_point_unused.
    """
    for part in draft.parts[1:]:
        part.most = max(16, round(draft.parts[0].most * log_uniform(chance, 0.05, 0.5)))
    _power(chance.uniform(0.6, 0.9), draft)


def _power(power: float, draft: Draft) -> None:
    for part in draft.parts:
        part.curve = tuple(
            (b, part.fixed + part.slope * b**power * 64 ** (1 - power)) for b in CURVED
        )


def knee(chance: random.Random, draft: Draft, longest: float = 2000) -> None:
    """Keep steps at 30 ms to 2 s up to 32 to 1,000 samples, then let them rise.

    The slope is 0.5 to 2.5 times that of a line to the knee. Includes flat_slow_steps and
    flat_then_steep.
    """
    level, knee, steep = (
        log_uniform(chance, 30, longest),
        log_uniform(chance, 32, 1000),
        chance.uniform(0.5, 2.5),
    )
    alike = chance.random() < 0.3
    for part in draft.parts:
        part.most, slower = (
            round(knee * log_uniform(chance, 1.3, 20)),
            chance.uniform(1, 1 if alike else 2),
        )
        flat_to(part, round(knee), level * slower, steep)


def stall(chance: random.Random, draft: Draft) -> None:
    """Round step times to multiples of a third to a twentieth of the longest one."""
    longest = max(part.fixed + part.slope * part.most for part in draft.parts)
    for part in draft.parts:
        part.keys["stall_ms"] = longest / chance.uniform(3, 20)


def jagged(chance: random.Random, draft: Draft) -> None:
    """Move times up to 15 % off a line at 22 batches, with a tolerance of 2 or 5 %."""
    draft.ask["tolerance"] = chance.choice((0.02, 0.05))
    for part in draft.parts:
        part.curve = tuple((b, t * chance.uniform(0.85, 1.15)) for b, t in line_points(part, JAGS))


def tiny_steps(chance: random.Random, draft: Draft) -> None:
    """Use fixed times of 0.05 to 2 ms per step, which vary by 2 to 6 %."""
    roughen(chance, draft)
    scale(draft, (0.05, 2), (0.001, 0.02), chance)
    draft.sync = Sync(log_uniform(chance, 0.01, 1), log_uniform(chance, 0.001, 0.1))


def huge_steps(chance: random.Random, draft: Draft) -> None:
    """Use fixed times of 0.1 to 3 s, and 2 to 30 ms per sample; up to 3,000 samples fit.

    Includes larger_budget_worse.
    """
    scale(draft, (100, 3000), (2, 30), chance)


def large_only(chance: random.Random, draft: Draft) -> None:
    """Keep steps flat up to 500 to 5,000 samples, so that small batches are useless.

    Up to 30,000 samples fit.
    """
    knee, level = log_uniform(chance, 500, 5000), log_uniform(chance, 20, 200)
    for part in draft.parts:
        part.most, part.each_mib = round(knee * log_uniform(chance, 1.2, 6)), chance.uniform(0.1, 1)
        flat_to(
            part,
            round(knee * chance.uniform(0.7, 1.4)),
            level * chance.uniform(1, 2),
            chance.uniform(0.8, 1.2),
        )
