"""What the observations say of the machine: each device's curve and limits, what keeping in step costs, who is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property

from evener.balancer.search.budget import Budget
from evener.balancer.search.layouts import split_evenly
from evener.balancer.search.model.contention import slow_by_contention
from evener.balancer.search.model.device_groups import group_devices
from evener.balancer.search.model.step_time import Curve, Point, fit_curve
from evener.balancer.search.model.sync_cost import fit_sync_costs
from evener.balancer.search.observations import DeviceEvidence, Observations, relative_error
from evener.balancer.search.waterfill import DeviceCurve
from evener.balancer.types import Layout, Problem, Timed

UNMEASURABLE = 0.002  # relative: a gain below it can't be seen
MATTERS_OF_TOLERANCE = 0.25  # a batch that gains less than this part of the tolerance does not matter either
SAME_LIMIT = 0.02  # devices that can't be told apart have one limit if theirs differ by less
REACH = 2  # times the largest batch that ran: curves and memory lines are not believed further in splits
SAME_SHARE = 0.015  # layouts whose shares differ by less, relatively, are the same measurement
NO_LIMIT = 1 << 30  # samples


class MachineModel:
    """A reading of the observations; everything is computed once, when it is first asked for."""

    def __init__(self, problem: Problem, seen: Observations, budget: Budget) -> None:
        self.problem, self.seen = problem, seen
        self.quantum = problem.multiple_of
        self.devices: tuple[DeviceEvidence, ...] = tuple(seen.device(i) for i in range(problem.devices))
        self._longest_step = budget.longest_step(solo=False) if budget.limits_steps else None  # as it is now

    @cached_property
    def cap(self) -> int:
        """The most samples that one device may ever have."""
        limits = (self.problem.largest_share, self.problem.global_batch, self.problem.max_global_batch)
        return min((limit for limit in limits if limit is not None), default=NO_LIMIT) // self.quantum * self.quantum

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Devices that were neither lost nor out of memory at the smallest share."""
        return tuple(i for i, device in enumerate(self.devices) if not device.lost and not self._full(i))

    def _full(self, position: int) -> bool:
        failed = self.devices[position].memory.failed
        return failed is not None and failed <= self.quantum

    @cached_property
    def groups(self) -> list[list[int]]:
        """Devices that can't be told apart."""
        return group_devices(self.devices)

    # ------------------------------------------------------------------ time

    @cached_property
    def alone(self) -> tuple[Curve | None, ...]:
        """Each device's curve as its own process; those that can't be told apart share theirs."""
        return self._fit(self._solo_points)

    @cached_property
    def in_splits(self) -> tuple[Curve | None, ...]:
        """Each device's curve within a split."""
        return self._fit(self._split_points)

    def _fit(self, points: Callable[[int], Iterable[Point]]) -> tuple[Curve | None, ...]:
        curves: list[Curve | None] = [None] * len(self.devices)
        for group in self.groups:
            curve = fit_curve(p for i in group for p in points(i))
            for i in group:
                curves[i] = curve
        return tuple(curves)

    def _solo_points(self, position: int) -> tuple[Point, ...]:
        """A device's solo points; with one device left, also those with the others at rest: it makes no difference."""
        device = self.devices[position]
        return (*device.alone, *device.at_rest) if not device.alone or len(self.live) == 1 else device.alone

    def _split_points(self, position: int) -> tuple[Point, ...]:
        """Its solo points, slowed as its splits were, and its own part of these."""
        device = self.devices[position]
        return (*slow_by_contention(device, self.alone[position]), *device.in_splits)

    @cached_property
    def splits(self) -> tuple[Timed, ...]:
        """Every split that exploration ran."""
        return tuple(turn for turns in self.seen.timed(["split"]).values() for turn in turns)

    @cached_property
    def standing_splits(self) -> tuple[Timed, ...]:
        """Those of them that nothing seen since refutes: their memory may have gone to others."""
        layouts = self.seen.standing({one.probe.layout: [one] for one in self.splits})
        return tuple(one for one in self.splits if one.probe.layout in layouts)

    @cached_property
    def at_rest(self) -> dict[int, Timed]:
        """Devices measured alone while the others were at rest: the best of each that may still run."""
        best: dict[int, Timed] = {}
        for turns in self.seen.standing(self.seen.timed(["rest"])).values():
            for one in turns:
                (i,) = one.probe.layout.active
                if i not in best or one.samples_per_second > best[i].samples_per_second:
                    best[i] = one
        return best

    @cached_property
    def sync_costs(self) -> tuple[float, ...]:
        """[k]: seconds that k devices spend to keep in step."""
        return fit_sync_costs([self._sync_sample(one) for one in self.splits], self.problem.devices)

    @cached_property
    def sync_seconds(self) -> float | None:
        """The cost for as many devices as the split measured last has, if any was."""
        return self.sync_costs[len(self.splits[-1].probe.layout.active)] if self.splits else None

    def _sync_sample(self, split: Timed) -> tuple[int, float, float]:
        layout = split.probe.layout
        own = [split.device_seconds[i] for i in layout.active]
        if all(own):
            slowest = max(t for t in own if t)
        else:
            slowest = max((c.seconds(layout.shares[i]) for i in layout.active if (c := self.alone[i])), default=0.0)
        return len(layout.active), split.step_seconds - slowest, relative_error(split) * split.step_seconds

    def predicted_rate(self, layout: Layout) -> float:
        """Samples/s that the curves give a solo or split layout; 0 if one of them is unknown."""
        active = layout.active
        curves = [(self.in_splits if len(active) > 1 else self.alone)[i] for i in active]
        times = [curve.seconds(layout.shares[i]) for i, curve in zip(active, curves, strict=True) if curve]
        seconds = max(times) + self.sync_costs[len(active)] if len(times) == len(active) else math.inf
        return layout.global_batch / seconds if seconds > 0 else 0.0

    # ------------------------------------------------------------------ limits

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Each device's largest share worth trying in a split, by memory alone; 0 for one that is left out."""
        bold = self.problem.global_batch is not None  # a fixed batch has to go somewhere
        own = [
            device.memory.largest_in_split(self.cap, self.quantum, bold) if i in self._live else 0
            for i, device in enumerate(self.devices)
        ]
        for group in self.groups:
            sizes = [own[i] for i in group if own[i]]
            if sizes and min(sizes) >= (1 - SAME_LIMIT) * max(sizes):
                for i in group:
                    own[i] = min(own[i], *sizes)
        return tuple(own)

    @cached_property
    def _live(self) -> frozenset[int]:
        return frozenset(self.live)

    def surely_fits(self, layout: Layout) -> bool:
        """Whether every share ran before, or is far below what the memory line allows."""
        return all(
            layout.shares[i] <= self.devices[i].memory.largest_safe(self.cap, self.quantum) for i in layout.active
        )

    def level(self, layout: Layout) -> Layout:
        """Equal shares for the same devices, if no measurement tells them from the layout's and they may fit."""
        if layout.kind != "split":
            return layout
        batches = [layout.global_batch]
        if self.problem.global_batch is None:  # the least share fits all
            batches.append(min(layout.shares[i] for i in layout.active) * len(layout.active))
        for batch in batches:
            whole = batch // self.quantum * self.quantum
            even = split_evenly(self.problem.devices, layout.active, whole, self.quantum)
            if even is None or not same_measurement(even.layout, layout):
                continue
            if all(share <= limit for share, limit in zip(even.layout.shares, self.limits, strict=True)):
                return even.layout
        return layout

    @cached_property
    def split_curves(self) -> tuple[DeviceCurve, ...]:
        """The live devices with their curves and limits in splits."""
        return tuple(
            DeviceCurve(i, curve, self.limits[i]) for i in self.live if (curve := self.in_splits[i]) and self.limits[i]
        )

    @cached_property
    def holds_batch(self) -> bool:
        """Whether the devices together can hold the fixed global batch; True for a free one."""
        return sum(device.limit for device in self.split_curves) >= (self.problem.global_batch or 0)

    def useful_limit(self, device: DeviceCurve) -> int:
        """The largest batch whose gain can be seen: fixed costs / (slope * batch) falls below what is measurable."""
        curve, limit = device.curve, self._quick_limit(device)
        gain = max(UNMEASURABLE, MATTERS_OF_TOLERANCE * self.problem.tolerance)
        slope = (curve.seconds(limit) - curve.seconds(self.quantum)) / max(1, limit - self.quantum)
        if slope <= 0 or not curve.straight:
            return limit
        overhead = curve.seconds(self.quantum) + (self.sync_seconds or 0.0)
        enough = math.ceil(overhead / slope / gain / self.quantum) * self.quantum
        return max(self.quantum, min(limit, enough))

    def reachable_limit(self, device: DeviceCurve, reach: int = REACH) -> int:
        """The largest useful batch that is near enough to what ran for its curve to be believed."""
        ran = self.devices[device.position].memory.ran
        return min(self.useful_limit(device), reach * ran) if ran else self.useful_limit(device)

    def _quick_limit(self, device: DeviceCurve) -> int:
        """The limit, cut where a step takes longer than the problem or its budget allows, though not below what ran."""
        if self._longest_step is None:
            return device.limit
        quick = device.curve.largest(self._longest_step, device.limit, self.quantum)
        return max(self.quantum, min(device.limit, max(self.devices[device.position].memory.ran, quick)))


def same_measurement(one: Layout, other: Layout, within: float = SAME_SHARE) -> bool:
    """Whether two layouts are the same for all that can be measured."""
    pairs = list(zip(one.shares, other.shares, strict=True))
    return all((a > 0) == (b > 0) and abs(a - b) <= within * max(a, b) for a, b in pairs)
