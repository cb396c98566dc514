"""All objectives, by the names that the command line, journals and JSON have for them; the first is the default."""

from __future__ import annotations

from evener.errors import RequestError

from .energy import ENERGY
from .objective import Objective

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
        raise RequestError(f"There is no objective {name!r}.", f"Choose from {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def that_trade_speed() -> str:
    """The names of objectives that a largest slowdown goes with, for a message."""
    return " or ".join(name for name, one in OBJECTIVES.items() if one.trades_speed)
