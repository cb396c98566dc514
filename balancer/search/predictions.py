"""Which layouts should train fastest, by what is known: surely, likely, or with luck."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from evener.balancer.search import waterfill
from evener.balancer.search.model.device_model import UNMEASURABLE, Known, guarded
from evener.balancer.search.waterfill import Fill, Lane
from evener.balancer.types import Layout, layout_of

INSURED = 0.85  # of the tolerance, for a layout that keeps to it although its measurement goes against it
HOPE = -0.8  # how far towards the fastest that it may be a curve with stairs is hoped to lie, where nothing else gains
LIKELY = 0.5  # how far towards the slowest that it may be a curve with stairs is likely faster
DOUBTS = 5  # halvings, towards the most doubt at which a layout is as fast
AS_FAST = 1e-6  # relative
SAME_SHARE = 0.015  # layouts whose shares differ by less, relatively, are the same measurement
REACH_ALONE = 4  # times the largest batch that ran: of one device, a curve is not believed further


class View(Known):
    """The layouts that are worth measuring, and what it expects of any; each is computed once."""

    @cached_property
    def first_guess(self) -> Fill | None:
        """The fill by solo curves, as if keeping in step cost nothing; a knee is guessed where no slope is told yet."""
        costs = (0.0,) * (self.problem.devices + 1)
        lanes = [guarded(lane) for lane in self.useful_guesses]
        batch = self.problem.global_batch
        if batch is None:
            return waterfill.free(lanes, costs, self.quantum, self.problem.max_global_batch)
        return waterfill.fixed(lanes, costs, batch, self.quantum, fewest=1)

    @cached_property
    def fastest_split(self) -> Fill | None:
        """The split of most samples/s that is predicted to fit; of several as fast, the one most sure to be."""
        best = self._filled(self.useful_lanes)
        if best is None or self.problem.global_batch is None or not self.stepped:
            return best
        return self._surer(best, 0.0, 1.0)

    def _surer(self, best: Fill, low: float, high: float) -> Fill:
        """A split as fast as that at doubt `low`, at the most doubt that allows it: edges are kept to alike."""
        seconds = best.seconds * (1 + AS_FAST)
        for _ in range(DOUBTS):
            middle = (low + high) / 2
            found = self._split_at(middle)
            if found and found.seconds <= seconds:
                best, low = found, middle
            else:
                high = middle
        return best

    @cached_property
    def surest_split(self) -> Fill | None:
        """The split of most samples/s that no doubt about stairs or bends can slow."""
        return self._split_at(1.0)

    @cached_property
    def likely_split(self) -> Fill | None:
        """The split of most samples/s that likely is as fast as predicted; None where there are no stairs."""
        return self._split_at(LIKELY) if self.stepped else None

    @cached_property
    def hopeful_split(self) -> Fill | None:
        """The split of most samples/s if stairs lie luckily; None where there are none."""
        if not self.stepped:
            return None
        found = self._split_at(HOPE)
        return self._surer(found, HOPE, 0.0) if found and self.problem.global_batch is not None else found

    def _split_at(self, doubt: float) -> Fill | None:
        curves = self.shared(self.together, doubt)
        return self._filled(Lane(x.device, curve, x.ceiling) for x in self.useful_lanes if (curve := curves[x.device]))

    def _filled(self, lanes: Iterable[Lane]) -> Fill | None:
        batch, limit = self.problem.global_batch, self.problem.max_global_batch
        if batch is not None:
            return waterfill.fixed(tuple(lanes), self.costs, batch, self.quantum)
        return waterfill.free(tuple(lanes), self.costs, self.quantum, limit)

    @cached_property
    def single_rate(self) -> float:
        """The most samples/s of one device alone: as measured at rest, else as its curve has it."""
        rates = [seen.samples_per_second for seen in self.rested.values()]
        rates += [f.samples_per_second for i in self.live if i not in self.rested and (f := self.single(i))]
        return max(rates, default=0.0)

    @cached_property
    def fastest_single(self) -> Fill | None:
        """The single device of most samples/s, at its best batch."""
        fills = [self.single(i) for i in self.live]
        return max((f for f in fills if f), key=lambda f: f.samples_per_second, default=None)

    def single(self, position: int, safe: bool = False, doubt: float = 0.0) -> Fill | None:
        """The best batch of one device alone; `safe`: among batches that surely fit."""
        curve = self.alone[position] if not doubt else self.alone_at(doubt)[position]
        memory = self.devices[position].memory
        room = memory.safe(self.cap, self.quantum) if safe else self.rooms[position]
        if curve is None or not room:
            return None
        batch = self.problem.global_batch
        if batch is not None:
            return Fill(((position, batch),), curve.seconds(batch)) if batch <= room else None
        lane = Lane(position, curve, room)
        return waterfill.alone(
            Lane(position, curve, self.near_what_ran(lane, REACH_ALONE)), self.quantum, self.problem.max_global_batch
        )

    @cached_property
    def tolerable(self) -> Fill | None:
        """The smallest global batch predicted to be within the tolerance of the fastest; None for a fixed batch."""
        return self._within(1.0)

    @cached_property
    def insured(self) -> Fill | None:
        """The same for a little less than the tolerance, should the measurements go against it by as much."""
        return self._within(INSURED)

    def _within(self, part: float) -> Fill | None:
        problem = self.problem
        if problem.global_batch is not None or not problem.tolerance:
            return None
        tops = [f.samples_per_second for f in (self.fastest_split, self.fastest_single) if f]
        rate = max(tops, default=0.0) * (1 - part * problem.tolerance)
        limit, quantum = problem.max_global_batch, self.quantum
        fills = [waterfill.smallest(self.useful_lanes, self.costs, rate, quantum, limit)] if rate else []
        for lane in self.lanes if rate else ():
            curve = self.alone[lane.device]
            if curve:
                fills.append(waterfill.alone_reaching(Lane(lane.device, curve, lane.ceiling), rate, quantum, limit))
        return min((f for f in fills if f), key=lambda f: (f.global_batch, f.seconds), default=None)

    def predicted_rate(self, layout: Layout) -> float:
        """Samples/s that the curves give a layout; 0 if one of them is unknown."""
        active = layout.active
        curves = [(self.beside if len(active) > 1 else self.alone)[i] for i in active]
        times = [curve.seconds(layout.shares[i]) for i, curve in zip(active, curves, strict=True) if curve]
        seconds = max(times) + self.costs[len(active)] if len(times) == len(active) else math.inf
        return layout.global_batch / seconds if seconds > 0 else 0.0

    def same(self, one: Layout, other: Layout, within: float = SAME_SHARE) -> bool:
        """Whether two layouts would be the same measurement; not if the edge of a stair lies between them."""
        if not near(one, other, within):
            return False
        if not any((curve := self.beside[i]) and curve.stair for i in one.active):
            return True
        rate = self.predicted_rate(other)
        return abs(self.predicted_rate(one) - rate) <= UNMEASURABLE * rate

    def layout(self, wanted: Fill) -> Layout:
        """A fill as a layout of the request."""
        shares = dict(wanted.shares)
        return layout_of(tuple(shares.get(i, 0) for i in range(self.problem.devices)))


def near(one: Layout, other: Layout, within: float = SAME_SHARE) -> bool:
    """Whether two layouts are the same for all that can be measured."""
    pairs = list(zip(one.shares, other.shares, strict=True))
    return all((a > 0) == (b > 0) and abs(a - b) <= within * max(a, b) for a, b in pairs)
