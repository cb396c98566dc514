"""The objectives: what a search can be asked to have most of.

`Objective` is what each of them has to say; `OBJECTIVES` lists them, the default first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from evener.errors import RequestError

from .number_format import efficiency
from .types import Power, Timed


class Objective(msgspec.Struct, frozen=True):
    """Something to have most of; where nothing is overridden, samples/s.

    An objective that `trades_speed` chooses the layout of the most `value`, among those that are at
    most a given part slower than the fastest. Others choose by speed.
    """

    name: str  # on the command line, in journals and in JSON
    summary: str  # for the help, behind the name
    unit: str = "samples/s"
    trades_speed: bool = False
    uses_lengths: bool = True  # rows are dealt by what their lengths cost, where they have any
    needs_lengths: bool = False  # without lengths of rows it can't be counted
    needs_energy: bool = False  # without the devices' power it can't be counted

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """The objective's value for a layout that trained at this rate in these measurements; 0 if
        it is unknown.
        """
        return samples_per_second

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """The cost of each device for a second that it trains and for one that only others do;
        empty if unknown.

        The value of a split is predicted as its samples/s over the sum of these.
        """
        return []

    def write(self, value: float) -> str:
        """A value for a sentence, with its unit."""
        return f"{value:.3g} {self.unit}"


def mean_power(turns: Iterable[Timed]) -> Power | None:
    """The power of all devices of the request over the turns in which every one reported it; None
    without any.
    """
    known = [seen.power for seen in turns]
    return Power.mean([power for power in known if power is not None])


class Energy(Objective, frozen=True):
    """Samples/s over the power of all devices of the request, idle ones too."""

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """Samples per joule by the mean power of the turns in which every device reported it."""
        power = mean_power(turns)
        return (power.samples_per_joule(samples_per_second) or 0.0) if power else 0.0

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """The most watts that each device drew while it trained, and the least while others did; 0
        where unknown.
        """
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

SPEED = Objective("throughput", "tokens/s where rows have lengths, else samples/s")
TOKENS = Objective("tokens", "tokens/s", needs_lengths=True)
SAMPLES = Objective("samples", "samples/s, leaving lengths out", uses_lengths=False)
OBJECTIVES: dict[str, Objective] = {one.name: one for one in (SPEED, TOKENS, SAMPLES, ENERGY)}


def add(objective: Objective) -> None:
    """Add an objective."""
    OBJECTIVES[objective.name] = objective


def find_objective(name: str) -> Objective:
    """An objective by its name; RequestError if there is none."""
    if name not in OBJECTIVES:
        raise RequestError(
            f"There is no objective {name!r}.", f"Choose from {', '.join(OBJECTIVES)}."
        )
    return OBJECTIVES[name]


def that_trade_speed() -> str:
    """The names of objectives that a largest slowdown goes with, for a message."""
    return " or ".join(name for name, one in OBJECTIVES.items() if one.trades_speed)
