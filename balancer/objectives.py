"""The metrics that a search can maximize."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from evener.errors import RequestError

from .number_format import efficiency
from .types import Power, Timed


class Objective(msgspec.Struct, frozen=True):
    """A metric that a search maximizes; samples/s unless a subclass overrides `value`.

    With `trades_speed`, a layout may be chosen that is up to `max_slowdown` slower than the fastest
    one, if its metric is higher.
    """

    name: str  # its name on the command line, in journals and in JSON
    summary: str  # text after the name in the help
    unit: str = "samples/s"
    trades_speed: bool = False
    uses_lengths: bool = True  # rows that have lengths are assigned by their cost
    needs_lengths: bool = False  # needs rows that have lengths
    needs_energy: bool = False  # needs the power of the devices

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """Return the metric of a layout.

        `samples_per_second` is the layout's throughput, and `turns` are its repeated measurements.
        """
        return samples_per_second

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """Return each device's cost per second while it computes, and while it is idle.

        The cost is in the subclass's unit, such as watts. A layout's metric is predicted as its
        throughput divided by the total cost of all devices. Empty if unknown.
        """
        return []

    def write(self, value: float) -> str:
        """Format a value of the metric with its unit."""
        return f"{value:.3g} {self.unit}"


def mean_power(turns: Iterable[Timed]) -> Power | None:
    """Return the mean power, in watts, or None if no measurement knows it.

    Only measurements in which every device reported its power count.
    """
    known = [seen.power for seen in turns]
    return Power.mean([power for power in known if power is not None])


class Energy(Objective, frozen=True):
    """Energy efficiency as the metric: samples per joule."""

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """Return samples per joule, or 0 if the power is unknown."""
        power = mean_power(turns)
        return (power.samples_per_joule(samples_per_second) or 0.0) if power else 0.0

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """Return the power of each device in watts: while computing, and while idle.

        The first is the highest measured, the second the lowest; 0 where not measured. The list is
        empty if no device was measured while computing.
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
        """Format samples per joule with the unit."""
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
    """Register an objective by its name."""
    OBJECTIVES[objective.name] = objective


def find_objective(name: str) -> Objective:
    """Return the objective of this name, or raise RequestError."""
    if name not in OBJECTIVES:
        raise RequestError(
            f"There is no objective {name!r}.", f"Choose from {', '.join(OBJECTIVES)}."
        )
    return OBJECTIVES[name]


def name_speed_trading() -> str:
    """Return the names of the objectives that `--max-slowdown` applies to, joined by "or"."""
    return " or ".join(name for name, one in OBJECTIVES.items() if one.trades_speed)
