"""What the evidence says of the devices: curves, room, what keeping in step costs, and who is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property

from evener.balancer.search.budget import Purse
from evener.balancer.search.model.contention import slowed
from evener.balancer.search.model.device_groups import classes
from evener.balancer.search.model.points import Point
from evener.balancer.search.model.step_time import Curve, Fit, fit
from evener.balancer.search.model.sync_cost import costs
from evener.balancer.search.observations import Device, Ledger, relative_error
from evener.balancer.search.waterfill import Lane
from evener.balancer.types import Problem, Timed

UNMEASURABLE = 0.002  # relative: a gain below it can't be seen
MATTERS_OF_TOLERANCE = 0.25  # a batch that gains less than this part of the tolerance does not matter either
STEPPED_SHARE = 3  # one device in so many with stairs makes them likely in the others
ROOMS_ALIKE = 0.02  # devices that can't be told apart have one ceiling if theirs differ by less
REACH = 2  # times the largest batch that ran: curves and memory lines are not believed further beside others
TOLD = 2.0  # a slope is told if it makes the guessed knee take so many times the time of an empty batch
GUESSED_KNEE = 0.25  # of the room
MORE_THAN_ANY = 1 << 30  # samples


class Known:
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
        return self.shared(self._own)

    @cached_property
    def beside(self) -> tuple[Curve | None, ...]:
        """Each device's curve within a split."""
        return self.shared(self.together)

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
        return tuple(Lane(lane.device, lane.curve, self.near_what_ran(lane, REACH)) for lane in self.lanes)

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

    def near_what_ran(self, lane: Lane, reach: int) -> int:
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
    def stepped(self) -> bool:
        """Whether a device's time beside others comes in stairs."""
        return any(lane.curve.stair for lane in self.lanes)

    @cached_property
    def stepped_alone(self) -> bool:
        """Whether a device's time alone comes in stairs."""
        return any(curve.stair for curve in self.alone if curve)

    def _own(self, position: int) -> tuple[Point, ...]:
        """A device's solo points; also those with the others at rest, where there are none or all show one stair."""
        device = self.devices[position]
        if not device.rested:
            return device.alone
        points = (*device.alone, *device.rested)
        curve = self._fit(points, 0.0, False)
        return points if len(self.live) == 1 or (curve and curve.stair) else device.alone

    def together(self, position: int) -> tuple[Point, ...]:
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

    def alone_at(self, doubt: float) -> tuple[Curve | None, ...]:
        if doubt not in self._doubted:
            self._doubted[doubt] = self.shared(self._own, doubt)
        return self._doubted[doubt]

    def shared(self, points: Callable[[int], Iterable[Point]], doubt: float = 0.0) -> tuple[Curve | None, ...]:
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
