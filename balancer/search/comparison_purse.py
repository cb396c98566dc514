"""How long a probe of a comparison may last, and whether it fits into what is left of the budget. Pure."""

from __future__ import annotations

from typing import Literal

from evener.balancer.search.comparison_told import Told
from evener.balancer.search.probe_costs import SHORTEST_SECONDS, Costs
from evener.balancer.types import Layout

Part = Literal["first", "grow", "race", "knobs"]
GROWN_BY = 0.65  # of the budget: beyond it no larger pack is tried
ENDED_BY = 0.95  # of it: what is measured already is not measured again, as a probe may take longer than it should
WANTED_SECONDS: dict[Part, float] = {"first": 4.0, "grow": 2.0, "race": 4.0, "knobs": 4.0}


class Purse:
    """The budget against what was spent, less `reserved_seconds` for what must still come after this part."""

    def __init__(self, budget_seconds: float | None, told: Told, reserved_seconds: float = 0.0) -> None:
        self.costs = Costs(told)
        self._budget = budget_seconds
        self._left = (budget_seconds or 0.0) - told.spent_seconds() - reserved_seconds
        self._spent = told.spent_seconds()

    def seconds(self, part: Part, layout: Layout, probes_left: int) -> float:
        """How long the next probe may measure, with about so many to come in its part."""
        wanted = WANTED_SECONDS[part]
        if self._budget is None:
            return wanted
        each = (self._left - self.costs.start(layout)) / max(1, probes_left) - self.costs.overhead(layout)
        return round(max(SHORTEST_SECONDS, min(wanted, each)), 3)

    def affords(self, part: Part, layout: Layout) -> bool:
        """Whether the shortest probe of this layout fits into what is left."""
        if self._budget is None:
            return True
        cost = self.costs.least(layout)
        until = {"first": 1.0, "grow": GROWN_BY, "race": ENDED_BY, "knobs": 1.0}[part]
        return cost <= self._left and self._spent + cost <= until * self._budget
