"""How long a probe of a comparison may last, and whether it fits into what is left of the budget. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from balancer.compare.told import Told
from balancer.records import Layout

Part = Literal["grow", "race", "knobs"]
SCOUT_SHARE, SCOUT_SHARE_SOLO = 0.4, 0.25  # of the budget, for the scout with and without splits
UNTIL: dict[Part, float] = {"grow": 0.65, "race": 0.92, "knobs": 1.0}  # of the budget, spent when a part ends
WANTED_SECONDS: dict[Part, float] = {"grow": 2.0, "race": 4.0, "knobs": 4.0}
SHORTEST_SECONDS = 0.3


class Purse:
    """The budget against what was spent. Without knobs to try, the race may use all of it."""

    def __init__(self, budget_seconds: float | None, told: Told, knobs: bool) -> None:
        self._budget = budget_seconds
        self._told = told
        self._knobs = knobs

    def seconds(self, part: Part, layout: Layout, probes_left: int) -> float:
        """How long the next probe may measure, with about so many to come in its part."""
        wanted = WANTED_SECONDS[part]
        if self._budget is None:
            return wanted
        each = self._left(part) / max(1, probes_left) - self._told.overhead_seconds(layout)
        return round(max(SHORTEST_SECONDS, min(wanted, each)), 3)

    def affords(self, part: Part, layout: Layout, reserve_seconds: float = 0.0) -> bool:
        """Whether the shortest probe of this layout fits into what its part has left, and leaves a reserve."""
        if self._budget is None:
            return True
        cost = self._told.overhead_seconds(layout) + SHORTEST_SECONDS
        return cost <= self._left(part) and cost + reserve_seconds <= self._budget - self._told.spent_seconds()

    def turn_seconds(self, layouts: Iterable[Layout]) -> float:
        """What one turn of these layouts should cost at the least."""
        return sum(self._told.overhead_seconds(layout) + SHORTEST_SECONDS for layout in layouts)

    def _left(self, part: Part) -> float:
        assert self._budget is not None
        until = 1.0 if part == "race" and not self._knobs else UNTIL[part]
        return until * self._budget - self._told.spent_seconds()
