"""A model of the machine by the observations: each device's curve and limits, and the time of gradient exchange.

Exchange that isn't hidden behind computation takes within_k + across_h: within_k = base + each * (k - 1) for k devices;
across_h is a line too, in the hosts that they are on, above that of as many devices on one host. For a number never
measured it is assumed low (optimism in the face of uncertainty): from one measured cost, fewer pay in proportion and
more pay the same. So a number that looks good gets tried and then measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from operator import gt

import msgspec

from evener.shares.curves import Curve, PassCurve, step_in_passes
from evener.shares.waterfill import DeviceCurve

from ..types import Layout, Timed, layout_of
from .bounds import Bounds
from .model.evidence import group_devices, relative_error
from .model.hope import bend_is_open
from .model.step_time import LEVEL, Point, fit_curve, fit_extra, merge_points, rising_line

SyncSample = tuple[int, float, float]  # devices or hosts, seconds, standard error in seconds
ExchangeSample = tuple[int, int, float, float]  # devices, hosts, seconds, standard error in seconds


class ExchangeCosts(msgspec.Struct, frozen=True):
    """Seconds of exchange that isn't hidden, within a host and across hosts."""

    within: tuple[float, ...]  # [k]: of k devices on one host
    across: tuple[float, ...] = (0.0, 0.0)  # [h]: more, if they are on h hosts

    def seconds(self, devices: int, hosts: int) -> float:
        """The seconds of exchange among `devices` devices on `hosts` hosts."""
        return self.within[devices] + self.across[hosts]

    def on(self, hosts: int) -> tuple[float, ...]:
        """The seconds of exchange among k devices on `hosts` hosts, as item k."""
        more = self.across[hosts]
        return tuple(cost + more if k > 1 else cost for k, cost in enumerate(self.within))


def fit_exchange_costs(samples: Sequence[ExchangeSample], devices: int, hosts: int) -> ExchangeCosts:
    """The costs for up to `devices` devices on `hosts` hosts; any never measured on one host count as the network's."""
    within = fit_sync_costs([(k, cost, error) for k, h, cost, error in samples if h == 1], devices)
    across = [(h, cost - within[k], error) for k, h, cost, error in samples if h > 1]
    return ExchangeCosts(within, fit_sync_costs(across, hosts))


def fit_sync_costs(samples: Sequence[SyncSample], most: int) -> tuple[float, ...]:
    """Seconds for 0, 1, ... `most` devices, never falling."""
    found = [(k - 1, max(0.0, cost), max(error, 1e-9) ** -2) for k, cost, error in samples if k > 1]
    widest = max((others for others, _, _ in found), default=1)
    if all(others == widest for others, _, _ in found):  # one number of devices, or none
        cost = math.fsum(w * cost for _, cost, w in found) / (math.fsum(w for _, _, w in found) or 1.0)
        return tuple(cost * min(1.0, max(0, k - 1) / widest) for k in range(most + 1))
    base, each = rising_line(found)
    return tuple(base + each * (k - 1) if k > 1 else 0.0 for k in range(most + 1))


def most_in_one(curve: Curve, rows: int, limit: int, extra: float) -> int:
    """The largest share, from the best rows of a pass to a limit, that two passes don't train faster than one."""
    shares = range(rows, max(rows, limit))
    faster = bisect_left(shares, True, key=lambda share: curve.seconds(share) > step_in_passes(curve, share, 2, extra))
    return shares[faster] if faster < len(shares) else max(rows, limit)


class MachineModel(Bounds):
    """A model of the machine by one set of observations."""

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Devices that neither failed nor ran out of memory at the smallest share."""
        return tuple(i for i, device in enumerate(self.devices) if not device.out_of_use(self.quantum))

    @cached_property
    def groups(self) -> list[list[int]]:
        """Indistinguishable devices."""
        return group_devices(self.devices, self.problem.limits)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The host of each device."""
        return self.problem.hosts or (0,) * self.problem.devices

    # ------------------------------------------------------------------ time

    @cached_property
    def alone(self) -> tuple[Curve | None, ...]:
        """Each device's curve as its own process; indistinguishable devices share one."""
        return self._fit(self.solo_points)

    @cached_property
    def in_splits(self) -> tuple[Curve | None, ...]:
        """Each device's curve within a split."""
        return self._fit(self._split_points)

    def _fit(self, points: Callable[[int], Iterable[Point]]) -> tuple[Curve | None, ...]:
        curves: list[Curve | None] = [None] * len(self.devices)
        for group in self.groups:
            curve = fit_curve((p for i in group for p in points(i)), len(self.live))
            for i in group:
                curves[i] = curve
        return tuple(curves)

    def solo_points(self, position: int) -> tuple[Point, ...]:
        """A device's solo points, and those at rest or in splits beyond them; with one device left all (knee)."""
        device = self.devices[position]
        known = max((p.batch for p in device.alone), default=0) if len(self.live) > 1 else 0
        return (*device.alone, *(p for p in (*device.at_rest, *device.in_splits) if p.batch > known))

    def _split_points(self, position: int) -> tuple[Point, ...]:
        """A device's solo points, measured while the others work too, and the points of its own part of splits."""
        return tuple(dict.fromkeys((*self.solo_points(position), *self.devices[position].in_splits)))

    @cached_property
    def splits(self) -> tuple[Timed, ...]:
        """Every split that exploration ran."""
        return tuple(self.seen.timed("split"))

    @cached_property
    def fitting_splits(self) -> tuple[Timed, ...]:
        """The explored splits that still fit, by all that was seen since."""
        return tuple(self.seen.still_fit(self.splits))

    @cached_property
    def at_rest(self) -> dict[int, Timed]:
        """Devices measured while the others were idle: the best of each that still fits and has a batch asked for."""
        best: dict[int, Timed] = {}
        for one in self.seen.still_fit(self.seen.timed("rest")):
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
        """The number of hosts that a layout's devices are on."""
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
        return tuple(self._pass_rows(i) if self.walls[i] else 0 for i in range(len(self.devices)))

    def _pass_rows(self, position: int) -> int:
        """The rows of a pass that are within reach, or fewer if they were clearly faster; 0 for a free batch."""
        device, curve = self.devices[position], self.alone[position]
        if not self.problem.micro or self.problem.global_batch is None or device.undivided or curve is None:
            return 0
        rows = self.reachable(DeviceCurve(position, curve, self.walls[position]))
        points = merge_points(p for i in self.group_of(position) for p in self.solo_points(i))
        fewer = {p.batch: p.seconds for p in points if self.quantum <= p.batch <= rows}
        if curve.simple and not bend_is_open(points, curve) and self.quantum <= curve.batches[-1] <= rows:
            fewer.setdefault(int(curve.batches[-1]), curve.times[-1])
        best = max(fewer, key=lambda batch: batch / fewer[batch], default=rows)
        gains = best in fewer and best / fewer[best] > (1 + LEVEL) * rows / curve.seconds(rows)
        return best // self.quantum * self.quantum if gains else rows

    def group_of(self, position: int) -> list[int]:
        """The devices that are indistinguishable from it, itself among them."""
        return next(group for group in self.groups if position in group)

    @cached_property
    def one_pass(self) -> tuple[int, ...]:
        """The largest share of each device in one pass: what fits, or less where two smaller passes are faster."""
        return tuple(map(self._in_one_pass, range(len(self.devices))))

    def _in_one_pass(self, position: int) -> int:
        wall, rows, curve = self.walls[position], self.pass_rows[position], self.in_splits[position]
        if not rows or rows >= wall or curve is None:
            return wall
        return most_in_one(curve, rows, wall, self.extra_seconds[position] or 0.0) // self.quantum * self.quantum

    @cached_property
    def extra_seconds(self) -> tuple[float | None, ...]:
        """The seconds of each device's further passes beyond a step of their rows; None without a step in passes.

        Measured by its own part of splits, otherwise alone; indistinguishable devices share the value.
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

    def in_passes(self, device: DeviceCurve, largest_share: int) -> DeviceCurve:
        """The device as it may take more than fits at once."""
        i, curve = device.position, device.curve
        rows, extra = self.pass_rows[i], self.extra_seconds[i] or 0.0
        if not rows or not isinstance(curve, Curve):
            return device
        rows = min(rows, device.limit)
        passes = PassCurve(curve, device.limit, rows, extra, max(rows, min(device.limit, self.walls[i])))
        return DeviceCurve(i, passes, max(device.limit, largest_share))

    def lay_out(self, shares: tuple[int, ...]) -> Layout:
        """A layout of these shares, in passes where they don't fit at once or are faster so."""
        return self._divide(shares, self.one_pass, self.pass_rows, self.walls)

    def lay_out_safely(self, shares: tuple[int, ...]) -> Layout | None:
        """A layout of these shares whose passes ran before or surely fit; None if that is impossible."""
        layout = self.lay_out(shares)
        if not self.surely_hold(layout):
            layout = self._divide(shares, self.safe, tuple(map(min, self.safe, self.pass_rows)), self.safe)
        return layout if self.surely_hold(layout) else None

    def _divide(
        self, shares: tuple[int, ...], walls: tuple[int, ...], rows: tuple[int, ...], fits: tuple[int, ...]
    ) -> Layout:
        """A layout whose shares above their walls are cut into passes of about `rows` rows; 0: not cut."""
        if not any(map(gt, shares, walls)):
            return layout_of(shares)
        return layout_of(
            shares, tuple(self._cut(i, share, walls[i], rows[i], fits[i]) for i, share in enumerate(shares))
        )

    def _cut(self, position: int, share: int, wall: int, rows: int, fits: int) -> int:
        """The rows of each pass of a share; all of them in one pass where that fits, or passes can't be taken."""
        curve = self.alone[position]
        if not rows or share <= wall or curve is None:
            return share
        extra = self.extra_seconds[position] or 0.0
        return -(-share // PassCurve(curve, wall, rows, extra, fits).passes(share))

    # ------------------------------------------------------------------ limits

    @cached_property
    def split_curves(self) -> tuple[DeviceCurve, ...]:
        """The live devices with their curves and limits in splits."""
        return tuple(
            DeviceCurve(i, curve, self.one_pass[i])
            for i in self.live
            if (curve := self.in_splits[i]) and self.one_pass[i]
        )

    @cached_property
    def holds_batch(self) -> bool:
        """True if the devices together can hold the fixed global batch, or take it in passes; True for a free one."""
        holds = sum(device.limit for device in self.split_curves) >= (self.problem.global_batch or 0)
        return holds or any(self.pass_rows)
