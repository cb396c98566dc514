"""A machine in the making: devices as a family draws and changes them, before they become a machine
file's keys.
"""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

from evener.devices.machine import Machine, SimulatedDevice, SimulatedEvent, Sync

FAR = 8192  # samples: the far point of a straight curve
CURVED = (1, 4, 16, 64, 256, 1024, 4096, 16384)  # samples: the points of a bent one
Curve = tuple[tuple[int, float], ...]


class Part(msgspec.Struct):
    """One device."""

    fixed: float  # ms
    slope: float  # ms a sample
    most: int  # samples that fit
    base_mib: float
    each_mib: float
    noise: float
    curve: Curve = ()  # empty: a straight line
    keys: dict[str, Any] = {}  # others of a machine file


class Draft(msgspec.Struct):
    """The machine, and what is asked of it: `ask` in every mode, a mode for each kind of batch."""

    parts: list[Part]
    sync: Sync
    events: list[SimulatedEvent] = []
    ask: dict[str, Any] = {}
    modes: tuple[str, ...] = ("free", "fixed")

    def machine(self) -> Machine:
        """As it stands now."""
        return Machine(
            tuple(_device(*one) for one in enumerate(self.parts)),
            self.sync,
            events=tuple(self.events),
        )


def log_uniform(chance: random.Random, low: float, high: float) -> float:
    """A number between the two, as likely in each octave."""
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def draw(chance: random.Random) -> Draft:
    """One model on two to four devices, up to 2.5 times as slow as each other; 60 to 3,000 samples
    fit.
    """
    slope, base, each = (
        log_uniform(chance, 0.1, 1.5),
        chance.uniform(300, 2500),
        log_uniform(chance, 1, 20),
    )
    fixed = log_uniform(chance, 3, 60)
    parts = []
    for _ in range(chance.choice((2, 2, 3, 4))):
        slower, noise = chance.uniform(1, 2.5), chance.choice((0.002, 0.005, 0.01, 0.02))
        most = round(log_uniform(chance, 60, 3000))
        parts.append(
            Part(
                fixed * slower * chance.uniform(0.8, 1.25), slope * slower, most, base, each, noise
            )
        )
    return Draft(parts, Sync(log_uniform(chance, 0.5, 15), log_uniform(chance, 0.05, 3)))


def redraw(chance: random.Random, draft: Draft, count: int) -> None:
    """As many devices, drawn like the first ones."""
    while len(draft.parts) < count:
        draft.parts += draw_like(chance, draft.parts[0])
    del draft.parts[count:]


def draw_like(chance: random.Random, part: Part) -> list[Part]:
    """Another device of the same model."""
    slower, most = chance.uniform(0.5, 2), round(log_uniform(chance, 60, 3000))
    return [
        msgspec.structs.replace(
            part, fixed=part.fixed * slower, slope=part.slope * slower, most=most, keys={}
        )
    ]


def scale(
    draft: Draft,
    fixed_ms: tuple[float, float],
    slope_ms: tuple[float, float],
    chance: random.Random,
) -> None:
    """The fastest device gets a fixed part and a slope between these; the others keep their
    distance to it.
    """
    least, flattest = min(p.fixed for p in draft.parts), min(p.slope for p in draft.parts)
    fixed, slope = log_uniform(chance, *fixed_ms) / least, log_uniform(chance, *slope_ms) / flattest
    for part in draft.parts:
        part.fixed, part.slope = part.fixed * fixed, part.slope * slope


def roughen(chance: random.Random, draft: Draft) -> None:
    """Steps vary by 2 to 6 %."""
    for part in draft.parts:
        part.noise = chance.uniform(0.02, 0.06)


def flat_to(part: Part, knee: int, level: float, steep: float) -> None:
    """`level` ms up to `knee` samples; beyond, each takes `steep` times its part of that."""
    far = max(2 * part.most, 2 * knee)
    part.curve = ((1, level), (knee, level), (far, level * (1 + steep * (far / knee - 1))))


def line_points(part: Part, batches: tuple[int, ...]) -> Curve:
    """Its straight line at these batches."""
    return tuple((batch, part.fixed + part.slope * batch) for batch in batches)


def room_mib(part: Part) -> float:
    """Memory for as many samples as fit."""
    return part.base_mib + part.each_mib * (part.most + 0.4)


def _device(position: int, part: Part) -> SimulatedDevice:
    keys: dict[str, Any] = {
        "name": f"d{position}",
        "noise": part.noise,
        "memory_mib": room_mib(part),
        "curve": part.curve or line_points(part, (1, max(FAR, 2 * part.most))),
    }
    if "memory_curve" not in part.keys:
        keys |= {"memory_base_mib": part.base_mib, "memory_per_sample_mib": part.each_mib}
    return SimulatedDevice(**(keys | part.keys))
