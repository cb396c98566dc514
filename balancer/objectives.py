"""The metrics that a search can maximize."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from evener.errors import RequestError

from .number_format import efficiency
from .types import Power, Timed


class Objective(msgspec.Struct, frozen=True):
    """A metric that a search maximizes; it is samples/s unless a subclass overrides `value`.

    With `trades_speed`, the search may choose a layout that is up to `max_slowdown` slower than the
    fastest one, if the metric of that layout is higher.
    """

    name: str  # its name on the command line, in journals and in JSON
    summary: str  # text after the name in the help
    unit: str = "samples/s"
    trades_speed: bool = False
    uses_lengths: bool = True  # rows that have lengths are assigned by their cost
    needs_lengths: bool = False  # needs rows that have lengths
    needs_energy: bool = False  # needs the power of the devices

    def value(self, samples_per_second: float, measurements: Iterable[Timed]) -> float:
        """Return the metric of a layout.

        `samples_per_second` is the layout's throughput. `measurements` are its repeated
        measurements, for metrics that need more than the throughput.
        """
        return samples_per_second

    def costs(self, measurements: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """Return each device's cost per second while it computes, and while it is idle.

        A subclass chooses the unit of the cost, such as watts. The metric of a layout is predicted
        as its throughput divided by the total cost of all devices. Returns an empty list if the
        costs are unknown.
        """
        return []

    def write(self, value: float) -> str:
        """Format a value of the metric with its unit."""
        return f"{value:.3g} {self.unit}"


def mean_power(measurements: Iterable[Timed]) -> Power | None:
    """Return the mean power in watts over the measurements in which all devices reported it.

    Returns None if there is no such measurement.
    """
    known = [seen.power for seen in measurements]
    return Power.mean([power for power in known if power is not None])


class Energy(Objective, frozen=True):
    """Energy efficiency as the metric: samples per joule."""

    def value(self, samples_per_second: float, measurements: Iterable[Timed]) -> float:
        """Return samples per joule, or 0 if the power is unknown."""
        power = mean_power(measurements)
        return (power.samples_per_joule(samples_per_second) or 0.0) if power else 0.0

    def costs(self, measurements: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """Return the power of each device in watts, while it computes and while it is idle.

        The power while computing is the highest that was measured, and the idle power is the
        lowest. 0 stands for an unknown power. The list is empty if no computing device's power is
        known.
        """
        active = [0.0] * devices
        idle: list[list[float]] = [[] for _ in range(devices)]
        for timed in measurements:
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
    """Register an objective, so that requests can name it."""
    OBJECTIVES[objective.name] = objective


def find_objective(name: str) -> Objective:
    """Return the objective with this name, or raise RequestError if there is none."""
    if name not in OBJECTIVES:
        raise RequestError(
            f"There is no objective {name!r}.", f"Choose from {', '.join(OBJECTIVES)}."
        )
    return OBJECTIVES[name]


def slowdown_objective_names() -> str:
    """Return the names of the objectives that `--max-slowdown` applies to, joined by "or"."""
    return " or ".join(name for name, one in OBJECTIVES.items() if one.trades_speed)
