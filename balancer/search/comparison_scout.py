"""What a comparison learns before its race: the batches that fit, who is fastest alone, and the best split. Pure.

The embedded search measures its solo stage, and its split stage where splits are wanted; its own race is left to the
comparison, which has more rivals.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

from evener.balancer.search.comparison_ration import within
from evener.balancer.search.layouts import Candidate, Wanted, alone, device_counts, evenly
from evener.balancer.search.probe_costs import solo_start
from evener.balancer.search.search import Search
from evener.balancer.types import Belief, CurveSketch, Observation, OutOfMemory, Probe, Problem, Result, Timed

BETTER = 0.005  # relative: a predicted split joins the race if it should beat the measured ones by more

ALIKE = 0.03  # relative: splits whose shares differ by less are not raced against each other


class Scout:
    """The embedded search, and what is read from it."""

    def __init__(self, problem: Problem, wanted: Wanted) -> None:
        self._asked_for, self._wanted = problem, wanted
        splits = "split" in wanted.families or problem.devices == 1  # one device goes on alone there
        self._stages = ("solo", "split") if splits else ("solo",)
        self._failed: list[int] = []  # batches that ran out of memory alone
        self._told: list[Observation] = []
        self._problem = within(problem, wanted, 0.0)
        self._search = Search(self._problem)

    def ask(self) -> tuple[Probe, ...]:
        """The search's probes; empty when it has come to its race, or to its end."""
        probes = self._search.ask()
        return probes if all(self._worth(probe) for probe in probes) else ()

    def tell(self, seen: Observation) -> None:
        """Take what the search asked for; how long children take to start says how much the search may spend."""
        self._told.append(seen)
        self._search.tell(seen)
        if isinstance(seen, OutOfMemory) and seen.probe.layout.kind == "solo":
            self._failed.append(seen.probe.layout.global_batch)
        start = solo_start(one for one in self._told if isinstance(one, Timed))
        problem = within(self._asked_for, self._wanted, start)
        if problem != self._problem:
            self._problem, self._search = problem, Search(problem)
            for one in self._told:
                self._search.tell(one)

    def best(self) -> Result | None:
        """The best layout so far."""
        return self._search.best()

    def results(self) -> tuple[Result, ...]:
        """Every layout that ran, best first."""
        return self._search.results()

    def solos(self) -> tuple[Result | None, ...]:
        """Each device alone at its fastest."""
        return self._search.solos()

    def belief(self) -> Belief:
        """The search's view."""
        return self._search.belief()

    def single(self) -> Candidate | None:
        """The device that is fastest alone, at the batch it should have; None if no device can train alone."""
        return next(iter(self.singles()), None)

    def singles(self) -> tuple[Candidate, ...]:
        """The devices that can train alone, each at the batch it should have, the fastest first."""
        batch, devices = self._problem.global_batch, self._problem.devices
        if batch is None:
            own = [(self.rate(i), i, self._own_batch(i)) for i in range(devices)]
            ran = sorted((one for one in own if one[0] and one[2]), key=lambda one: -one[0])
            return tuple(alone(devices, i, size) for _, i, size in ran)
        curves = self.belief().curves
        fit = [i for i in range(devices) if self.rate(i) and _fits(curves[i], batch)]
        fit.sort(key=lambda i: ((curves[i].largest_batch or 0) < batch, seconds(curves[i], batch)))
        return tuple(alone(devices, i, batch) for i in fit)

    def rate_at(self, position: int, batch: int) -> float:
        """Samples/s of a device alone at a batch, by its curve; 0 if it has none."""
        return batch / seconds(self.belief().curves[position], batch)

    def evens(self) -> tuple[Candidate, ...]:
        """The even split over 2, 4, ... of the fastest devices."""
        problem = self._problem
        order = sorted(range(problem.devices), key=self.rate, reverse=True)
        order = [i for i in order if self.rate(i)]
        found = []
        for count in device_counts(len(order)):
            positions = tuple(sorted(order[:count]))
            candidate = evenly(problem.devices, positions, self._even_batch(positions), problem.multiple_of)
            if candidate is not None:
                found.append(candidate)
        return tuple(found)

    def splits(self) -> tuple[Candidate, ...]:
        """The best split that was measured, and those that the search would race as well: all are sure to fit."""
        found = [result for result in self.results() if result.layout.kind == "split"]
        if not found:
            return ()
        best = self.best()
        chosen = best if best is not None and best.layout.kind == "split" else found[0]
        kept = [chosen.layout]
        for layout in self._search.contenders():
            known = (*kept, *(result.layout for result in found))
            if layout.kind == "split" and not any(self._search.same(layout, other, ALIKE) for other in known):
                kept.append(layout)
        return tuple(Candidate("split", layout, extra=layout != chosen.layout) for layout in kept)

    def better_single(self) -> Candidate | None:
        """A batch of one device that was not measured and should be faster than any that was; None without one."""
        if self._problem.global_batch is not None:
            return None
        least = max(self.rate(i) for i in range(self._problem.devices)) * (1 + BETTER)
        for layout in self._search.contenders():
            if layout.kind == "solo" and self._search.predicted_rate(layout) > least:
                return Candidate("solo", layout, extra=True)
        return None

    def common_batch(self) -> int | None:
        """The batch for layouts that have none of their own: the given one, the best single device's, else one that
        no single device could hold."""
        if self._problem.global_batch is not None:
            return self._problem.global_batch
        single = self.single()
        return single.layout.global_batch if single else min(self._failed, default=None)

    def _worth(self, probe: Probe) -> bool:
        """Whether a probe is the scout's; a free split smaller than all that ran alone is a guess from one point."""
        if probe.stage != "split" or self._problem.global_batch is not None:
            return probe.stage in self._stages
        ran = [one.layout.global_batch for i in range(self._problem.devices) for one in self._solos(i)]
        return probe.stage in self._stages and probe.layout.global_batch >= min(ran, default=0)

    def rate(self, position: int) -> float:
        """The device's highest samples/s alone; 0 if it never ran."""
        return max((one.throughput.value for one in self._solos(position)), default=0.0)

    def _solos(self, position: int) -> list[Result]:
        return [one for one in self.results() if one.layout.kind == "solo" and one.layout.active == (position,)]

    def _own_batch(self, position: int) -> int:
        """The smallest measured batch within the tolerance of the device's best; 0 if it never ran."""
        least = self.rate(position) * (1 - self._problem.tolerance)
        limit = self._problem.max_global_batch or math.inf
        sizes = [one.layout.global_batch for one in self._solos(position) if one.throughput.value >= least]
        return min((size for size in sizes if size <= limit), default=0)

    def _even_batch(self, positions: tuple[int, ...]) -> int:
        problem = self._problem
        if problem.global_batch is not None:
            return problem.global_batch
        each = min(self._own_batch(i) for i in positions)
        if problem.max_global_batch is not None:
            each = min(each, problem.max_global_batch // len(positions))
        return each // problem.multiple_of * problem.multiple_of * len(positions)


def seconds(curve: CurveSketch, batch: int) -> float:
    """The curve's step time at a batch: linear between its points, and beyond them; infinite if it has none."""
    points = curve.points or curve.measured
    if len(points) < 2:
        return points[0][1] * batch / points[0][0] if points else math.inf
    right = min(max(bisect_left([size for size, _ in points], batch), 1), len(points) - 1)
    (size0, time0), (size1, time1) = list(pairwise(points))[right - 1]
    return time0 + (time1 - time0) * (batch - size0) / (size1 - size0)


def _fits(curve: CurveSketch, batch: int) -> bool:
    return curve.smallest_failed is None or batch < curve.smallest_failed
