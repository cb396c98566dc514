"""What the evidence says: curves, room and costs, and from them the layouts that should train fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property

from balancer.core import fill
from balancer.core.alike import classes
from balancer.core.beside import slowed
from balancer.core.curve import Curve, Fit, fit
from balancer.core.fill import Fill, Lane
from balancer.core.ledger import Device, Ledger, relative_error
from balancer.core.points import Point
from balancer.core.stop import Purse
from balancer.core.sync import costs
from balancer.records import Layout, Problem, Timed, layout_of

INSURED = 0.85  # of the tolerance, for a layout that keeps to it although its measurement goes against it
UNMEASURABLE = 0.002  # relative: a gain below it can't be seen
MATTERS_OF_TOLERANCE = 0.25  # a batch that gains less than this part of the tolerance does not matter either
HOPE = -0.8  # how far towards the fastest that it may be a curve with stairs is hoped to lie, where nothing else gains
LIKELY = 0.5  # how far towards the slowest that it may be a curve with stairs is likely faster
DOUBTS = 5  # halvings, towards the most doubt at which a layout is as fast
AS_FAST = 1e-6  # relative
STEPPED_SHARE = 3  # one device in so many with stairs makes them likely in the others
SAME_SHARE = 0.015  # layouts whose shares differ by less, relatively, are the same measurement
ROOMS_ALIKE = 0.02  # devices that can't be told apart have one ceiling if theirs differ by less
REACH = 2  # times the largest batch that ran: curves and memory lines are not believed further beside others,
REACH_ALONE = 4  # and of one device
TOLD = 2.0  # a slope is told if it makes the guessed knee take so many times the time of an empty batch
GUESSED_KNEE = 0.25  # of the room
MORE_THAN_ANY = 1 << 30  # samples


class View:
    """A reading of one ledger; everything is computed once, when it is first asked for."""

    def __init__(self, problem: Problem, ledger: Ledger, fitted: Fit = fit) -> None:
        self.problem = problem
        self.ledger = ledger
        self._fit = fitted
        self.quantum = problem.multiple_of
        self._doubted: dict[float, tuple[Curve | None, ...]] = {}  # curves alone, by doubt
        self.devices: tuple[Device, ...] = tuple(ledger.device(i) for i in range(problem.devices))

    @cached_property
    def cap(self) -> int:
        """The most samples that one device may ever have."""
        limits = (self.problem.largest_share, self.problem.global_batch, self.problem.max_global_batch)
        return (
            min((limit for limit in limits if limit is not None), default=MORE_THAN_ANY) // self.quantum * self.quantum
        )

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Devices that were neither lost nor out of memory at the smallest batch."""
        return tuple(i for i, device in enumerate(self.devices) if not device.lost and not self.full(i))

    def full(self, position: int) -> bool:
        """Whether a device can't even hold the smallest share."""
        failed = self.devices[position].memory.failed
        return failed is not None and failed <= self.quantum

    @cached_property
    def groups(self) -> list[list[int]]:
        """Devices that can't be told apart."""
        return classes(self.devices)

    @cached_property
    def alone(self) -> tuple[Curve | None, ...]:
        """Each device's curve as its own process; those that can't be told apart share theirs."""
        return self._shared(self._own)

    @cached_property
    def beside(self) -> tuple[Curve | None, ...]:
        """Each device's curve within a split."""
        return self._shared(self._together)

    @cached_property
    def splits(self) -> tuple[Timed, ...]:
        """Every split that ran."""
        return tuple(
            t for turns in self.ledger.timed(["split"]).values() for t in turns if t.probe.layout.kind == "split"
        )

    @cached_property
    def standing_splits(self) -> tuple[Timed, ...]:
        """Those of them that nothing seen since refutes: their memory may have gone to others."""
        layouts = self.ledger.standing({seen.probe.layout: [seen] for seen in self.splits})
        return tuple(seen for seen in self.splits if seen.probe.layout in layouts)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """[k]: seconds that k devices spend to keep in step."""
        return costs([self._cost_of(seen) for seen in self.splits], self.problem.devices)

    @cached_property
    def sync_seconds(self) -> float | None:
        """The cost of the split measured last, if any was."""
        return self.costs[len(self.splits[-1].probe.layout.active)] if self.splits else None

    @cached_property
    def rooms(self) -> tuple[int, ...]:
        """Each device's largest share worth trying beside others, by memory alone."""
        bold = self.problem.global_batch is not None  # a fixed batch has to go somewhere
        own = [
            self.devices[i].memory.room(self.cap, self.quantum, bold) if i in self._live else 0
            for i in range(len(self.devices))
        ]
        for group in self.groups:
            sizes = [own[i] for i in group if own[i]]
            if sizes and min(sizes) >= (1 - ROOMS_ALIKE) * max(sizes):
                for i in group:
                    own[i] = min(own[i], *sizes)
        return tuple(own)

    @cached_property
    def _live(self) -> frozenset[int]:
        return frozenset(self.live)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The live devices as the fill sees them, with room by memory."""
        return tuple(Lane(i, curve, self.rooms[i]) for i in self.live if (curve := self.beside[i]) and self.rooms[i])

    @cached_property
    def lanes_hold_batch(self) -> bool:
        """Whether the devices together have room for the fixed global batch; True for a free one."""
        return sum(lane.ceiling for lane in self.lanes) >= (self.problem.global_batch or 0)

    @cached_property
    def useful_lanes(self) -> tuple[Lane, ...]:
        """The lanes, cut where a larger batch gains too little to be measured, or is far from all that ran."""
        if self.problem.global_batch is not None:
            return self.lanes
        return tuple(Lane(lane.device, lane.curve, self._near(lane, REACH)) for lane in self.lanes)

    @cached_property
    def guesses(self) -> tuple[Lane, ...]:
        """The live devices by their solo curves, with room as the next guess has it."""
        sizes = ((i, self.devices[i].memory.next_guess(self.cap, self.quantum)) for i in self.live)
        return tuple(Lane(i, curve, size) for i, size in sizes if (curve := self.alone[i]) and size)

    @cached_property
    def useful_guesses(self) -> tuple[Lane, ...]:
        """The guesses, cut where a larger batch gains too little to be measured."""
        if self.problem.global_batch is not None:
            return self.guesses
        return tuple(Lane(lane.device, lane.curve, self.useful(lane)) for lane in self.guesses)

    @cached_property
    def first_guess(self) -> Fill | None:
        """The fill by solo curves, as if keeping in step cost nothing; a knee is guessed where no slope is told yet."""
        costs = (0.0,) * (self.problem.devices + 1)
        lanes = [guarded(lane) for lane in self.useful_guesses]
        batch = self.problem.global_batch
        if batch is None:
            return fill.free(lanes, costs, self.quantum, self.problem.max_global_batch)
        return fill.fixed(lanes, costs, batch, self.quantum, fewest=1)

    def useful(self, lane: Lane) -> int:
        """The largest batch whose gain can be seen: fixed costs / (slope * batch) falls below what is measurable."""
        lane = self._quick(lane)
        gain = max(UNMEASURABLE, MATTERS_OF_TOLERANCE * self.problem.tolerance)
        slope = (lane.curve.seconds(lane.ceiling) - lane.curve.seconds(self.quantum)) / max(
            1, lane.ceiling - self.quantum
        )
        if slope <= 0 or not lane.curve.straight:
            return lane.ceiling
        overhead = lane.curve.seconds(self.quantum) + (self.sync_seconds or 0.0)
        enough = math.ceil(overhead / slope / gain / self.quantum) * self.quantum
        return max(self.quantum, min(lane.ceiling, enough))

    def _near(self, lane: Lane, reach: int) -> int:
        """The largest useful batch that is near enough to what ran for its curve to be believed."""
        ran = self.devices[lane.device].memory.ran
        return min(self.useful(lane), reach * ran) if ran else self.useful(lane)

    def _quick(self, lane: Lane) -> Lane:
        """The lane, cut where a step takes longer than the problem or its budget allows, though not below what ran."""
        if self.problem.budget_seconds is None and self.problem.longest_step_seconds is None:
            return lane
        longest = self._longest_step
        quick = max(self.devices[lane.device].memory.ran, lane.curve.largest(longest, lane.ceiling, self.quantum))
        return Lane(lane.device, lane.curve, max(self.quantum, min(lane.ceiling, quick)))

    @cached_property
    def _longest_step(self) -> float:
        return Purse(self.problem, self.ledger).longest_split_step

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

    @cached_property
    def stepped(self) -> bool:
        """Whether a device's time beside others comes in stairs."""
        return any(lane.curve.stair for lane in self.lanes)

    @cached_property
    def stepped_alone(self) -> bool:
        """Whether a device's time alone comes in stairs."""
        return any(curve.stair for curve in self.alone if curve)

    def _split_at(self, doubt: float) -> Fill | None:
        curves = self._shared(self._together, doubt)
        return self._filled(Lane(x.device, curve, x.ceiling) for x in self.useful_lanes if (curve := curves[x.device]))

    def _filled(self, lanes: Iterable[Lane]) -> Fill | None:
        batch, limit = self.problem.global_batch, self.problem.max_global_batch
        if batch is not None:
            return fill.fixed(tuple(lanes), self.costs, batch, self.quantum)
        return fill.free(tuple(lanes), self.costs, self.quantum, limit)

    def _own(self, position: int) -> tuple[Point, ...]:
        """A device's solo points; also those with the others at rest, where there are none or all show one stair."""
        device = self.devices[position]
        if not device.rested:
            return device.alone
        points = (*device.alone, *device.rested)
        curve = self._fit(points, 0.0, False)
        return points if len(self.live) == 1 or (curve and curve.stair) else device.alone

    def _together(self, position: int) -> tuple[Point, ...]:
        """A device's points within a split: its solo points, slowed as its splits were, and its own part of these."""
        device = self.devices[position]
        return (*slowed(device, self.alone[position]), *device.beside)

    @cached_property
    def rested(self) -> dict[int, Timed]:
        """Devices measured alone while the others were at rest: the best of each."""
        best: dict[int, Timed] = {}
        for turns in self.ledger.standing(self.ledger.timed(["split"])).values():
            for seen in turns:
                if seen.probe.layout.kind == "solo":
                    (i,) = seen.probe.layout.active
                    if i not in best or seen.samples_per_second > best[i].samples_per_second:
                        best[i] = seen
        return best

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
        curve = self.alone[position] if not doubt else self._alone_at(doubt)[position]
        memory = self.devices[position].memory
        room = memory.safe(self.cap, self.quantum) if safe else self.rooms[position]
        if curve is None or not room:
            return None
        batch = self.problem.global_batch
        if batch is not None:
            return Fill(((position, batch),), curve.seconds(batch)) if batch <= room else None
        lane = Lane(position, curve, room)
        return fill.alone(
            Lane(position, curve, self._near(lane, REACH_ALONE)), self.quantum, self.problem.max_global_batch
        )

    def _alone_at(self, doubt: float) -> tuple[Curve | None, ...]:
        if doubt not in self._doubted:
            self._doubted[doubt] = self._shared(self._own, doubt)
        return self._doubted[doubt]

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
        fills = [fill.smallest(self.useful_lanes, self.costs, rate, quantum, limit)] if rate else []
        for lane in self.lanes if rate else ():
            curve = self.alone[lane.device]
            if curve:
                fills.append(fill.alone_reaching(Lane(lane.device, curve, lane.ceiling), rate, quantum, limit))
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

    def _shared(self, points: Callable[[int], Iterable[Point]], doubt: float = 0.0) -> tuple[Curve | None, ...]:
        known = [tuple(p for i in group for p in points(i)) for group in self.groups]
        fits = [self._fit(one, doubt, False) for one in known]
        if sum(1 for curve in fits if curve and curve.stair) * STEPPED_SHARE >= len(fits):
            fits = [self._fit(one, doubt, True) for one in known]
        curves: list[Curve | None] = [None] * len(self.devices)
        for group, curve in zip(self.groups, fits, strict=True):
            for i in group:
                curves[i] = curve
        return tuple(curves)

    def _cost_of(self, seen: Timed) -> tuple[int, float, float]:
        layout = seen.probe.layout
        own = [seen.device_seconds[i] for i in layout.active]
        if all(own):
            slowest = max(t for t in own if t)
        else:
            slowest = max((c.seconds(layout.shares[i]) for i in layout.active if (c := self.alone[i])), default=0.0)
        return len(layout.active), seen.step_seconds - slowest, relative_error(seen) * seen.step_seconds


def guarded(lane: Lane) -> Lane:
    """The lane, with a guessed knee where its two small batches took nearly the same time and tell no slope."""
    curve, knee = lane.curve, max(1.0, lane.ceiling * GUESSED_KNEE)
    level = curve.seconds(knee)
    if level > TOLD * curve.seconds(0):
        return lane
    return Lane(lane.device, Curve((0.0, knee), (level, level), level / knee), lane.ceiling)


def near(one: Layout, other: Layout, within: float = SAME_SHARE) -> bool:
    """Whether two layouts are the same for all that can be measured."""
    pairs = list(zip(one.shares, other.shares, strict=True))
    return all((a > 0) == (b > 0) and abs(a - b) <= within * max(a, b) for a, b in pairs)
