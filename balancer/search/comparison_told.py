"""What a comparison was told: every observation once, read by stage, turn and layout. Equal sets read equal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from evener.balancer.types import Layout, Observation, Probe, Stage, Timed

Slot = tuple[Stage, int, Layout]
FIRST = 0  # the turn in which every layout is measured once


class Told:
    """Observations by stage, turn and layout; of two on one, the worse news counts."""

    def __init__(self) -> None:
        self._seen: dict[Slot, Observation] = {}

    def add(self, seen: Observation) -> bool:
        """Take an observation; False if it says nothing new."""
        slot = _slot(seen.probe)
        known = self._seen.get(slot)
        if known is not None and _rank(known) >= _rank(seen):
            return False
        self._seen[slot] = seen
        return True

    def get(self, stage: Stage, layout: Layout, turn: int = 0) -> Observation | None:
        """What came of a measurement; None if it is open."""
        return self._seen.get((stage, turn, layout))

    def of(self, stage: Stage) -> list[Observation]:
        """Everything of a stage."""
        return [seen for (own, _, _), seen in self._seen.items() if own == stage]

    def turns(self, layout: Layout, wanted: Callable[[int], bool] = lambda _: True) -> dict[int, Timed]:
        """The turns that a layout took; what was measured before, with nothing beside it, has had its first."""
        found = {
            turn: seen
            for (stage, turn, other), seen in self._seen.items()
            if stage == "race" and other == layout and wanted(turn) and isinstance(seen, Timed)
        }
        before = self.before(layout)
        if before is not None and before.probe.stage != "solo" and FIRST not in found and wanted(FIRST):
            found[FIRST] = before
        return dict(sorted(found.items()))

    def before(self, layout: Layout) -> Timed | None:
        """What was measured of a layout before the race, last; None if nothing was."""
        found = [seen for seen in self.timed() if seen.probe.stage != "race" and seen.probe.layout == layout]
        return max(found, key=lambda seen: (seen.probe.stage, seen.probe.turn), default=None)

    def broken(self, layout: Layout) -> Observation | None:
        """The first turn of the race that did not run, if one didn't: it takes part no more."""
        broken = [
            (turn, seen)
            for (stage, turn, other), seen in self._seen.items()
            if stage == "race" and other == layout and not isinstance(seen, Timed)
        ]
        return min(broken, key=lambda pair: pair[0])[1] if broken else None

    def timed(self) -> list[Timed]:
        """Everything that ran."""
        return [seen for seen in self._seen.values() if isinstance(seen, Timed)]

    def spent_seconds(self, until: float = math.inf) -> float:
        """What all probes cost, those of the race up to the turn `until`.

        Solo probes of one turn run at the same time, everything else one after another.
        """
        together: defaultdict[int, float] = defaultdict(float)
        total = 0.0
        for (stage, turn, _), seen in self._seen.items():
            if stage == "solo":
                together[turn] = max(together[turn], seen.elapsed_seconds)
            elif stage != "race" or turn <= until:
                total += seen.elapsed_seconds
        return total + sum(together.values())


def _slot(probe: Probe) -> Slot:
    return (probe.stage, probe.turn, probe.layout)


def _rank(seen: Observation) -> tuple[int, float]:
    """Of two observations of one probe: not having run is the worse news, then the longer measurement counts."""
    if isinstance(seen, Timed):
        return (0, seen.steps - seen.step_seconds)
    return (1, -seen.elapsed_seconds)
