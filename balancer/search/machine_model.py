"""What the observations say about the machine: each device's curve and limits, the costs of synchronization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from operator import gt

from evener.balancer.search.layouts import same_measurement, split_evenly
from evener.balancer.search.model.contention import slow_by_contention
from evener.balancer.search.model.device_groups import group_devices
from evener.balancer.search.model.evidence import lend_memory_lines
from evener.balancer.search.model.memory import UNBOUNDED
from evener.balancer.search.model.pass_curve import fit_extra, hope_for_extra
from evener.balancer.search.model.step_time import Point, fit_curve
from evener.balancer.search.model.sync_cost import ExchangeCosts, ExchangeSample, fit_exchange_costs
from evener.balancer.search.model.throughput_drop import FALL
from evener.balancer.search.observations import Observations
from evener.balancer.search.ranking import LEAST_GAIN, smallest_gain
from evener.balancer.search.timed_points import relative_error
from evener.balancer.types import Layout, Problem, Timed, layout_of
from evener.shares.curves import Curve, PassCurve, step_in_passes
from evener.shares.waterfill import DeviceCurve

SAME_LIMIT = 0.02  # relative: indistinguishable devices whose limits differ by less get the smaller one

# Bounds on the rows that one device computes at once, each within the one it names:
#   cap                    the request: largest share, fixed global batch, largest global batch
#   Memory.predict_largest where the memory line meets the device's memory; may be unknown
#   Memory.largest_to_try  within cap: the next guess alone (predict_largest, or between what ran and what failed)
#   Memory.largest_in_split  within cap: the same for splits, less the memory that exchange takes
#   Memory.largest_safe    within cap: what ran, or a little more if predict_largest is far above it
#   limits                 largest_in_split, equal for indistinguishable devices: the wall of one pass
#   pass_rows              within limits, and not clearly slower than fewer rows; a share may be many times it
#   useful_limit           within a given limit: further batches gain too little or their steps take too long
#   reachable_limit        within useful_limit: at most so many times what ran
#   SoloStage._largest_that_matters  within largest_to_try and useful_limit: what a split could give the device


class MachineModel:
    """What one set of observations says; everything is computed once, when it is first asked for."""

    def __init__(self, problem: Problem, seen: Observations, longest_step_seconds: float | None) -> None:
        self.problem, self.seen = problem, seen
        self.quantum = problem.multiple_of
        self.hosts = problem.hosts or (0,) * problem.devices
        self.devices = lend_memory_lines([seen.device(i) for i in range(problem.devices)], problem.products)
        self._longest_step = longest_step_seconds

    @cached_property
    def cap(self) -> int:
        """The most samples that one device may ever have."""
        limits = (self.problem.largest_share, self.problem.global_batch, self.problem.max_global_batch)
        return min((limit for limit in limits if limit is not None), default=UNBOUNDED) // self.quantum * self.quantum

    @cached_property
    def largest_share(self) -> int:
        """The most samples that one device may have in passes; a fixed batch in as many as it needs."""
        limits = (self.problem.global_batch or self.problem.largest_share, self.problem.max_global_batch)
        return min((limit for limit in limits if limit is not None), default=UNBOUNDED) // self.quantum * self.quantum

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Devices that neither failed nor ran out of memory at the smallest share."""
        return tuple(i for i, device in enumerate(self.devices) if not device.lost and not self._full(i))

    def _full(self, position: int) -> bool:
        failed = self.devices[position].memory.failed
        return failed is not None and failed <= self.quantum

    @cached_property
    def groups(self) -> list[list[int]]:
        """Indistinguishable devices."""
        return group_devices(self.devices)

    # ------------------------------------------------------------------ time

    @cached_property
    def alone(self) -> tuple[Curve | None, ...]:
        """Each device's curve as its own process; indistinguishable devices share one."""
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
        """A device's solo points; with one device left also those at rest, as nothing contends."""
        device = self.devices[position]
        return (*device.alone, *device.at_rest) if not device.alone or len(self.live) == 1 else device.alone

    def _split_points(self, position: int) -> tuple[Point, ...]:
        """Its solo points, slowed by contention, and its own part of splits."""
        device = self.devices[position]
        return (*slow_by_contention(device, self.alone[position]), *device.in_splits)

    @cached_property
    def splits(self) -> tuple[Timed, ...]:
        """Every split that exploration ran."""
        return tuple(turn for turns in self.seen.timed(["split"]).values() for turn in turns)

    @cached_property
    def fitting_splits(self) -> tuple[Timed, ...]:
        """Those that still fit, by all that was seen since."""
        layouts = self.seen.still_fit({one.probe.layout: [one] for one in self.splits})
        return tuple(one for one in self.splits if one.probe.layout in layouts)

    @cached_property
    def at_rest(self) -> dict[int, Timed]:
        """Devices measured while the others were idle: the best of each that still fits and has a batch asked for."""
        best: dict[int, Timed] = {}
        fit = self.seen.still_fit(self.seen.timed(["rest"]))
        for one in (one for turns in fit.values() for one in turns):
            (i,), batch = one.probe.layout.active, one.probe.layout.global_batch
            if self.problem.global_batch in (None, batch):
                best[i] = max(best.get(i, one), one, key=lambda each: each.samples_per_second)
        return best

    @cached_property
    def exchange(self) -> ExchangeCosts:
        """The gradient exchange that isn't hidden behind computation, within a host and across hosts."""
        samples = [self._exchange_sample(one) for one in self.splits]
        return fit_exchange_costs(samples, self.problem.devices, len(set(self.hosts)))

    @cached_property
    def sync_seconds(self) -> float | None:
        """The cost for as many devices as the widest split that ran, if any did."""
        widest = max((one.probe.layout for one in self.splits), key=lambda one: len(one.active), default=None)
        return self._exchange_seconds(widest) if widest else None

    def _exchange_seconds(self, layout: Layout) -> float:
        return self.exchange.seconds(len(layout.active), self.count_hosts(layout))

    def count_hosts(self, layout: Layout) -> int:
        """On how many hosts its devices are."""
        return len({self.hosts[i] for i in layout.active})

    def _exchange_sample(self, split: Timed) -> ExchangeSample:
        layout = split.probe.layout
        own = [split.device_seconds[i] for i in layout.active]
        if all(own):
            slowest = max(t for t in own if t)
        else:
            slowest = max((self._seconds(i, layout, c) for i in layout.active if (c := self.alone[i])), default=0.0)
        error = relative_error(split) * split.step_seconds
        return len(layout.active), self.count_hosts(layout), split.step_seconds - slowest, error

    def predicted_rate(self, layout: Layout) -> float:
        """Samples/s of a solo or split layout by the curves; 0 if one of them is unknown."""
        active = layout.active
        curves = [(self.in_splits if len(active) > 1 else self.alone)[i] for i in active]
        times = [self._seconds(i, layout, curve) for i, curve in zip(active, curves, strict=True) if curve]
        seconds = max(times) + self._exchange_seconds(layout) if len(times) == len(active) else math.inf
        return layout.global_batch / seconds if seconds > 0 else 0.0

    def _seconds(self, position: int, layout: Layout, curve: Curve) -> float:
        extra = self.extra_seconds[position] or 0.0
        return step_in_passes(curve, layout.shares[position], layout.passes(position), extra)

    # ------------------------------------------------------------------ passes

    @cached_property
    def pass_rows(self) -> tuple[int, ...]:
        """The most rows of each of several passes; 0 for a device that takes its share in one."""
        return tuple(self._pass_rows(i) if self.limits[i] else 0 for i in range(len(self.devices)))

    def _pass_rows(self, position: int) -> int:
        """What fits, or fewer where they were clearly faster; 0 for a free batch, which would grow without end."""
        device, curve, rows = self.devices[position], self.alone[position], self.limits[position]
        if not self.problem.micro or self.problem.global_batch is None or device.undivided or curve is None:
            return 0
        fewer = [p for p in device.alone if self.quantum <= p.batch <= rows]
        best = max(fewer, key=lambda p: p.batch / p.seconds, default=None)
        if best and best.batch / best.seconds > (1 + FALL) * rows / curve.seconds(rows):
            return best.batch // self.quantum * self.quantum
        return rows

    @cached_property
    def extra_seconds(self) -> tuple[float | None, ...]:
        """What each further pass costs a device beside a step of its rows; None where no step in passes was measured.

        By its own part of splits, else alone; indistinguishable devices share it.
        """
        found: list[float | None] = [None] * len(self.devices)
        for group in self.groups:
            for i in group:
                found[i] = self._fit_extra(group)
        return tuple(found)

    def _fit_extra(self, group: list[int]) -> float | None:
        first, devices = group[0], [self.devices[i] for i in group]
        if not self.pass_rows[first]:
            return None
        for points, curve in (
            ([p for device in devices for p in device.split_in_passes], self.in_splits[first]),
            ([p for device in devices for p in device.alone_in_passes], self.alone[first]),
        ):
            if points and curve:
                return fit_extra(points, curve, self.pass_rows[first])
        return None

    def in_passes(self, device: DeviceCurve, largest_share: int, hopeful: bool = False) -> DeviceCurve:
        """The device as it may take more than fits at once; an unknown cost of passes is 0, or less if `hopeful`."""
        i, curve = device.position, device.curve
        rows, extra = self.pass_rows[i], self.extra_seconds[i]
        if not rows or not isinstance(curve, Curve):
            return device
        if extra is None:
            extra = hope_for_extra(curve, rows) if hopeful else 0.0
        return DeviceCurve(i, PassCurve(curve, self.limits[i], rows, extra), max(device.limit, largest_share))

    def knows_passes(self, layout: Layout) -> bool:
        """Whether each device that takes several passes in this layout ran several before."""
        return all(layout.passes(i) == 1 or self.extra_seconds[i] is not None for i in layout.active)

    def lay_out(self, shares: tuple[int, ...]) -> Layout:
        """A layout of these shares, in passes where they don't fit at once."""
        return self._divide(shares, self.limits, self.pass_rows)

    def lay_out_safely(self, shares: tuple[int, ...]) -> Layout | None:
        """The same with passes that ran before or surely fit; None where that is not possible."""
        layout = self.lay_out(shares)
        if not self.safely_fits(layout):
            layout = self._divide(shares, self.safe_limits, self._safe_rows)
        return layout if self.safely_fits(layout) else None

    def _divide(self, shares: tuple[int, ...], walls: tuple[int, ...], rows: tuple[int, ...]) -> Layout:
        """Shares above their walls in passes of at most so many rows; 0: not divided."""
        if not any(map(gt, shares, walls)):
            return layout_of(shares)
        pairs = zip(shares, walls, rows, strict=True)
        return layout_of(shares, tuple(most if most and share > wall else share for share, wall, most in pairs))

    @cached_property
    def safe_limits(self) -> tuple[int, ...]:
        """The largest share of each device that surely fits at once."""
        return tuple(device.memory.largest_safe(self.cap, self.quantum) for device in self.devices)

    @cached_property
    def _safe_rows(self) -> tuple[int, ...]:
        """The same of each of several passes."""
        return tuple(map(min, self.safe_limits, self.pass_rows))

    # ------------------------------------------------------------------ limits

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Each device's largest share worth trying in a split, by memory alone; 0 for one that is left out."""
        bold = self.problem.global_batch is not None  # a fixed batch has to go somewhere
        own = [0] * len(self.devices)
        for i in self.live:
            own[i] = self.devices[i].memory.largest_in_split(self.cap, self.quantum, bold)
        for group in self.groups:
            sizes = [own[i] for i in group if own[i]]
            if sizes and min(sizes) >= (1 - SAME_LIMIT) * max(sizes):
                for i in group:
                    own[i] = min(own[i], *sizes)
        return tuple(own)

    def safely_fits(self, layout: Layout) -> bool:
        """Whether every share ran before, or is far below what the memory line allows."""
        return all(layout.pass_rows[i] <= self.safe_limits[i] for i in layout.active)

    def fits(self, layout: Layout) -> bool:
        """Whether every pass is predicted to fit."""
        return all(rows <= limit for rows, limit in zip(layout.pass_rows, self.limits, strict=True))

    def level(self, layout: Layout) -> Layout:
        """Equal shares for the same devices, if they fit and a measurement could not distinguish the two layouts."""
        if layout.kind != "split":
            return layout
        batches = [layout.global_batch]
        if self.problem.global_batch is None:  # the least share fits all
            batches.append(min(layout.shares[i] for i in layout.active) * len(layout.active))
        for batch in batches:
            whole = batch // self.quantum * self.quantum
            shares = split_evenly(self.problem.devices, layout.active, whole, self.quantum)
            even = self.lay_out(shares.shares) if shares else layout
            if not same_measurement(even, layout) or not self.fits(even):
                continue
            if self.predicted_rate(even) >= self.predicted_rate(layout) * (1 - LEAST_GAIN):
                return even
        return layout

    @cached_property
    def split_curves(self) -> tuple[DeviceCurve, ...]:
        """The live devices with their curves and limits in splits."""
        return tuple(
            DeviceCurve(i, curve, self.limits[i]) for i in self.live if (curve := self.in_splits[i]) and self.limits[i]
        )

    @cached_property
    def holds_batch(self) -> bool:
        """Whether the devices together can hold the fixed global batch, or take it in passes; True for a free one."""
        holds = sum(device.limit for device in self.split_curves) >= (self.problem.global_batch or 0)
        return holds or any(self.pass_rows)

    def useful_limit(self, device: DeviceCurve) -> int:
        """The largest batch that matters: beyond it, fixed costs / (slope * batch) is below `smallest_gain`."""
        curve, limit = device.curve, self._quick_limit(device)
        gain = smallest_gain(self.problem.tolerance)
        slope = (curve.seconds(limit) - curve.seconds(self.quantum)) / max(1, limit - self.quantum)
        if slope <= 0 or not curve.simple:
            return limit
        overhead = curve.seconds(self.quantum) + (self.sync_seconds or 0.0)
        enough = math.ceil(overhead / slope / gain / self.quantum) * self.quantum
        return max(self.quantum, min(limit, enough))

    def reachable_limit(self, device: DeviceCurve, reach: int) -> int:
        """The largest useful batch that is near enough to what ran for the curve to be trusted."""
        ran = self.devices[device.position].memory.ran
        return min(self.useful_limit(device), reach * ran) if ran else self.useful_limit(device)

    def _quick_limit(self, device: DeviceCurve) -> int:
        """The limit, reduced so that no step takes longer than is allowed, but not below the largest that ran."""
        if self._longest_step is None:
            return device.limit
        quick = device.curve.largest(self._longest_step, device.limit, self.quantum)
        return max(self.quantum, min(device.limit, max(self.devices[device.position].memory.ran, quick)))
