"""Samples per joule: the most efficient layout that is not much slower than the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..number_format import efficiency
from ..types import Power, Timed
from .objective import Objective


class Energy(Objective, frozen=True):
    """Samples/s over the power of all devices of the request, idle ones too."""

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """Samples per joule by the mean power of the turns in which every device reported it."""
        power = Power.mean([power for seen in turns if (power := seen.power)])
        return (power.samples_per_joule(samples_per_second) or 0.0) if power else 0.0

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """The most watts that each device drew while it trained, and the least while others did; 0 where unknown."""
        drawn = [(one.probe.layout, one.watts) for one in seen if one.watts]
        found = []
        for i in range(devices):
            active = [watts[i] or 0.0 for layout, watts in drawn if i in layout.active]
            idle = [watts[i] or 0.0 for layout, watts in drawn if i not in layout.active]
            found.append((max(active, default=0.0), min(filter(None, idle), default=0.0)))
        return found if any(active for active, _ in found) else []

    def write(self, value: float) -> str:
        """3.45 samples per joule."""
        return f"{efficiency(value)} {self.unit}"


ENERGY = Energy(
    "samples-per-joule",
    "the most efficient layout within --max-slowdown of the fastest",
    "samples per joule",
    trades_speed=True,
    needs_energy=True,
)
