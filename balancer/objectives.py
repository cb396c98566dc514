"""The objectives: the metrics that a search can maximize.

`Objective` is the interface of an objective. `OBJECTIVES` has the objectives by name, the default
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from evener.errors import RequestError

from .number_format import efficiency
from .types import Power, Timed


class Objective(msgspec.Struct, frozen=True):
    """A metric to maximize; samples/s unless a subclass overrides it.

    With `trades_speed`, the search takes the layout with the highest `value` among fast layouts. A
    fast layout is at most a given fraction slower than the fastest. Without `trades_speed`, the
    search chooses by speed.
    """

    name: str  # its name on the command line, in journals and in JSON
    summary: str  # text after the name in the help
    unit: str = "samples/s"
    trades_speed: bool = False
    uses_lengths: bool = True  # rows that have lengths are assigned by their cost
    needs_lengths: bool = False  # needs rows that have lengths
    needs_energy: bool = False  # needs the power of the devices

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """Return the metric's value for a layout with this rate.

        The value is 0 if it is unknown. `turns` are the measurements of the layout.
        """
        return samples_per_second

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """Return each device's cost per second while it trains, and while only others train.

        A cost is, for example, the device's power in watts. Return an empty list if the costs are
        unknown. `seen` are all measurements so far.

        The samples/s of a split, divided by the sum of all devices' costs, predict its value.
        """
        return []

    def write(self, value: float) -> str:
        """Return a value as text with its unit."""
        return f"{value:.3g} {self.unit}"


def mean_power(turns: Iterable[Timed]) -> Power | None:
    """Return the mean power, in watts, of the turns in which every device reported it.

    Return None if there are no such turns.
    """
    known = [seen.power for seen in turns]
    return Power.mean([power for power in known if power is not None])


class Energy(Objective, frozen=True):
    """Samples per joule: samples/s divided by the power of all devices, including idle ones."""

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """Return samples per joule; 0 if the power is unknown.

        The power is the mean over the turns in which every device reported it.
        """
        power = mean_power(turns)
        return (power.samples_per_joule(samples_per_second) or 0.0) if power else 0.0

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """Return each device's power in watts, when training and when idle.

        An idle device waits while only other devices train. Of several measurements of a device,
        the first power is the highest, and the second the lowest. An unknown power is 0. Return an
        empty list if no device reports its power while it trains.
        """
        active = [0.0] * devices
        idle: list[list[float]] = [[] for _ in range(devices)]
        for timed in seen:
            for i, watts in enumerate(timed.watts):
                if not watts:
                    continue
                if i in timed.probe.layout.active:
                    active[i] = max(active[i], watts)
                else:
                    idle[i].append(watts)
        if not any(active):
            return []
        return [(most, min(others, default=0.0)) for most, others in zip(active, idle, strict=True)]

    def write(self, value: float) -> str:
        """Return a value as text, such as `3.45 samples per joule`."""
        return f"{efficiency(value)} {self.unit}"


ENERGY = Energy(
    "samples-per-joule",
    "the most efficient layout within --max-slowdown of the fastest",
    "samples per joule",
    trades_speed=True,
    needs_energy=True,
)

SPEED = Objective("throughput", "tokens/s where rows have lengths, else samples/s")
TOKENS = Objective("tokens", "tokens/s", needs_lengths=True)
SAMPLES = Objective("samples", "samples/s, leaving lengths out", uses_lengths=False)
OBJECTIVES: dict[str, Objective] = {one.name: one for one in (SPEED, TOKENS, SAMPLES, ENERGY)}


def add(objective: Objective) -> None:
    """Register an objective under its name, so that searches can use it."""
    OBJECTIVES[objective.name] = objective


def find_objective(name: str) -> Objective:
    """Return the objective with this name. Raises RequestError if there is none."""
    if name not in OBJECTIVES:
        raise RequestError(
            f"There is no objective {name!r}.", f"Choose from {', '.join(OBJECTIVES)}."
        )
    return OBJECTIVES[name]


def name_speed_trading() -> str:
    """Return the names of the objectives that accept a maximum slowdown, for a message."""
    return " or ".join(name for name, one in OBJECTIVES.items() if one.trades_speed)
