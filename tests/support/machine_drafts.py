"""Random simulated machines that are still being changed, before they become a machine file."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

from evener.devices.machine import Machine, SimulatedDevice, SimulatedEvent, Sync

FAR = 8192  # samples: the last point of a straight curve
# samples: the points of a curve that isn't straight
CURVED = (1, 4, 16, 64, 256, 1024, 4096, 16384)
Curve = tuple[tuple[int, float], ...]


class Part(msgspec.Struct):
    """One device."""

    fixed: float  # ms
    slope: float  # ms per sample
    most: int  # the largest batch that fits, in samples
    base_mib: float
    each_mib: float
    noise: float
    curve: Curve = ()  # empty: the time is a straight line
    keys: dict[str, Any] = {}  # other keys of a machine file


class Draft(msgspec.Struct):
    """A machine and the questions about it: the options `ask`, with each of `modes`."""

    parts: list[Part]
    sync: Sync
    events: list[SimulatedEvent] = []
    ask: dict[str, Any] = {}
    modes: tuple[str, ...] = ("free", "fixed")

    def machine(self) -> Machine:
        """Return the machine as it is now."""
        return Machine(
            tuple(_device(*one) for one in enumerate(self.parts)),
            self.sync,
            events=tuple(self.events),
        )


def log_uniform(chance: random.Random, low: float, high: float) -> float:
    """Return a random number between the two, with a uniform logarithm."""
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def draw(chance: random.Random) -> Draft:
    """Return one device model on 2 to 4 devices, with up to 2.5 times different speeds, for 60 to
    3,000 samples.
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
    """Replace the devices by `count` new ones, drawn like the first ones."""
    while len(draft.parts) < count:
        draft.parts += draw_like(chance, draft.parts[0])
    del draft.parts[count:]


def draw_like(chance: random.Random, part: Part) -> list[Part]:
    """Return more devices of the same model."""
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
    """Move the fastest device's fixed time and slope into these ranges.

    The other devices are scaled in proportion.
    """
    least, flattest = min(p.fixed for p in draft.parts), min(p.slope for p in draft.parts)
    fixed, slope = log_uniform(chance, *fixed_ms) / least, log_uniform(chance, *slope_ms) / flattest
    for part in draft.parts:
        part.fixed, part.slope = part.fixed * fixed, part.slope * slope


def roughen(chance: random.Random, draft: Draft) -> None:
    """Make step times vary by 2 to 6 %."""
    for part in draft.parts:
        part.noise = chance.uniform(0.02, 0.06)


def flat_to(part: Part, knee: int, level: float, steep: float) -> None:
    """Set a curve of `level` ms up to `knee` samples; beyond it, samples cost `steep` times more.

    That is `steep` times `level / knee` for each.
    """
    far = max(2 * part.most, 2 * knee)
    part.curve = ((1, level), (knee, level), (far, level * (1 + steep * (far / knee - 1))))


def line_points(part: Part, batches: tuple[int, ...]) -> Curve:
    """Return points of its straight line at these batches."""
    return tuple((batch, part.fixed + part.slope * batch) for batch in batches)


def room_mib(part: Part) -> float:
    """Return the memory that the largest batch needs, in MiB."""
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
