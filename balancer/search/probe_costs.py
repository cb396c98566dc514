"""What a probe should cost at the least: starting its children, warming up, and the fewest steps that time it. Pure.

Children that stand already cost no start. For those that don't, a start is guessed from the solo probes', which are the
first of all and so the slowest: what they have read from the disk is in memory then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from evener.balancer.search.comparison_told import Told
from evener.balancer.search.statistics import median
from evener.balancer.types import Layout, Timed

SHORTEST_SECONDS = 0.3  # of measuring
LEAST_STEPS = 8  # of any probe: the first, the warm-up, and a few blocks
STARTS = {"solo": 1.0, "split": 1.5, "place": 1.0, "pack": 0.8}  # of a solo start; of a pack, for each training


class Costs:
    """Estimates from all that was told, in seconds."""

    def __init__(self, told: Told) -> None:
        self._seen = told.timed()
        self._rates = _rates(self._seen)

    def least(self, layout: Layout) -> float:
        """The shortest probe of a layout, with the start of its children where they don't stand."""
        return self.start(layout) + self.overhead(layout) + SHORTEST_SECONDS

    def total(self, layouts: Iterable[Layout]) -> float:
        """The shortest probe of each."""
        return sum(self.least(layout) for layout in layouts)

    def start(self, layout: Layout) -> float:
        """Starting and building the children; 0 where they stand, and don't have to make room again and again."""
        own = [seen.start_seconds for seen in self._seen if _crew(seen.probe.layout) == _crew(layout)]
        if own:
            paid = [seconds for seconds in own if seconds]
            return min(paid) if len(paid) > 1 else 0.0
        if layout.kind == "pack" and (starts := self._pack_starts()):
            return _along(starts, layout.processes)
        return solo_start(self._seen) * STARTS[layout.kind] * layout.processes

    def _pack_starts(self) -> list[tuple[int, float]]:
        """(trainings, seconds that their start took) in rising number; the middle of several."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for seen in self._seen:
            if seen.probe.layout.kind == "pack" and seen.start_seconds:
                found[seen.probe.layout.processes].append(seen.start_seconds)
        return [(size, median(seconds)) for size, seconds in sorted(found.items())]

    def overhead(self, layout: Layout) -> float:
        """What the probe takes beside its start and the time that it is given to measure."""
        own = [_overhead(seen) for seen in self._seen if seen.probe.layout == layout]
        return min(own) if own else LEAST_STEPS * self._step(layout)

    def _step(self, layout: Layout) -> float:
        """Seconds of a step as the devices alone promise it; 0 if none of them ran."""
        rates = [self._rates[position] for position in layout.active if position in self._rates]
        rate = (sum if layout.kind == "split" else max)(rates or [0.0])
        return layout.global_batch * layout.processes / rate if rate else 0.0


def solo_start(seen: Iterable[Timed]) -> float:
    """The longest start of a device alone; 0 if none is known."""
    return max((one.start_seconds for one in seen if one.probe.layout.kind == "solo"), default=0.0)


def _crew(layout: Layout) -> Layout:
    """The layout without its sizes: what runs on the same children reads equal."""
    return msgspec.structs.replace(layout, shares=tuple(int(share > 0) for share in layout.shares))


def _along(starts: list[tuple[int, float]], processes: int) -> float:
    """Seconds to start so many trainings: in proportion, or less where a second size shows that cores are free."""
    (least, quickest), (most, longest) = starts[0], starts[-1]
    each = longest / most
    slope = each if most == least else min(each, max(0.0, (longest - quickest) / (most - least)))
    return max(0.0, longest + slope * (processes - most))


def _rates(seen: Iterable[Timed]) -> dict[int, float]:
    rates: dict[int, float] = {}
    for one in seen:
        if one.probe.layout.kind == "solo":
            (position,) = one.probe.layout.active
            rates[position] = max(one.samples_per_second, rates.get(position, 0.0))
    return rates


def _overhead(seen: Timed) -> float:
    return max(0.0, seen.elapsed_seconds - seen.start_seconds - seen.steps * seen.step_seconds)
