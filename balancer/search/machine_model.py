"""Predict the step time and memory of any layout from measurements of devices and splits.

A split is a layout in which several devices share each batch. Each device has a curve of its
compute time by rows, and a memory limit. A step takes as long as its slowest device, plus the part
of the gradient exchange that computation doesn't hide.

For k devices on h hosts, this part takes within_k + across_h seconds. within_k = base + each * (k -
1) is the time of k devices on a single host. across_h is linear in h, and is added if the devices
are on several hosts.

Before a split was measured, the exchange is assumed to be fast, so that layouts aren't rejected
without a measurement. After one measured split, fewer devices are assumed to take proportionally
less time, and more devices the same time. If that makes another number of devices look good, it is
measured next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from evener.shares.waterfill import Costs, DeviceCurve

from ..types import KnownLink, Layout, Problem, Stage, Timed, layout_of
from .device_model import DeviceModel
from .model.evidence import group_devices, read_device, step_error, with_drift
from .model.link_time import (
    HIDDEN_BY_BACKWARD,
    HIDDEN_IN_SHARDS,
    all_reduce_seconds,
    shard_pass_seconds,
)
from .model.step_time import rising_line
from .observations import Observations
from .time_left import TimeLeft

LEAST_SYNC_ERROR = 1e-9  # seconds; avoids division by 0
SyncSample = tuple[int, float, float]  # devices or hosts, seconds, standard error in seconds
ExchangeSample = tuple[int, int, float, float]  # devices, hosts, seconds, standard error in seconds
ExchangeCosts = tuple[Costs, ...]  # [h][k]: seconds of k devices on h hosts


def fit_exchange_costs(
    samples: Sequence[ExchangeSample], devices: int, hosts: int
) -> ExchangeCosts:
    """Fit the exchange time as a function of the numbers of devices and hosts.

    `samples` come from measured splits. Item `[h][k]` of the result is the seconds for k devices on
    h hosts.
    """
    on_one = [(k, cost, error) for k, h, cost, error in samples if h == 1]
    within = fit_sync_costs(on_one, devices)
    on_several = [(h, cost - within[k], error) for k, h, cost, error in samples if h > 1]
    across = fit_sync_costs(on_several, hosts)
    found = []
    for network in across:
        of_several_devices = [cost + network for cost in within[2:]]
        found.append((*within[:2], *of_several_devices))
    return tuple(found)


def fit_sync_costs(samples: Sequence[SyncSample], largest: int) -> tuple[float, ...]:
    """Fit the exchange time as a non-decreasing line in the number of devices (or of hosts).

    Item k of the result is the time of k devices in seconds, from 0 to `largest` devices. If all
    samples have the same number of devices, fewer devices are assumed to take proportionally less
    time, and more devices the same time.
    """
    # the cost of k devices depends on the number of others, k - 1
    found = []
    for k, cost, error in samples:
        weight = max(error, LEAST_SYNC_ERROR) ** -2
        found.append((k - 1, max(0.0, cost), weight))
    measured = {others for others, _, _ in found}
    further = range(1, largest)  # others of 2 to `most` devices
    if len(measured) > 1:
        base, each = rising_line(found)
        costs = [base + each * others for others in further]
    else:
        widest = max(measured, default=1)
        cost = _weighted_mean(found)
        costs = [cost * min(1.0, others / widest) for others in further]
    alone = (0.0, 0.0)[: largest + 1]
    return (*alone, *costs)


def _weighted_mean(samples: Sequence[tuple[float, float, float]]) -> float:
    """Return the weighted mean of the samples' seconds; 0 without samples.

    Each sample is a tuple (number of other devices, seconds, weight). The first item isn't used.
    """
    weights = math.fsum(weight for _, _, weight in samples)
    if not weights:
        return 0.0
    return math.fsum(weight * value for _, value, weight in samples) / weights


class MachineModel:
    """Predicts the step time and memory of any layout from the observations so far."""

    # True: devices take rows in the order of the data, so packs and placements are possible
    by_rows = True

    def __init__(self, problem: Problem, observations: Observations, time: TimeLeft) -> None:
        self.problem = problem
        self.seen = observations
        self.time = time
        self.quantum = problem.multiple_of
        # least number of devices in a split
        self.fewest = problem.devices if problem.all_together else 2
        self.hosts = problem.hosts or (0,) * problem.devices
        evidence = with_drift([read_device(observations, i) for i in range(problem.devices)])
        self.groups = group_devices(evidence, problem.limits)
        groups = sorted((i, group) for group in self.groups for i in group)
        self.devices = tuple(DeviceModel(i, problem, time, evidence, group) for i, group in groups)
        self.live = tuple(device.position for device in self.devices if not device.is_unusable)

    @cached_property
    def splits(self) -> tuple[Timed, ...]:
        """Measured steps over several devices, to which the exchange time is fitted."""
        found = self.seen.timed(Stage.SPLIT)
        return tuple(one for one in found if one.probe.layout.by_rows == self.by_rows)

    @cached_property
    def fitting_splits(self) -> tuple[Timed, ...]:
        """Measured steps over several devices whose layouts can probably still run."""
        return tuple(self.seen.still_fit(self.splits))

    @cached_property
    def others_idle(self) -> dict[int, Timed]:
        """Each device's fastest measurement while the other devices were idle, by position.

        If a global batch was requested, only measurements with that batch count.
        """
        best: dict[int, Timed] = {}
        for one in self.seen.still_fit(self.seen.timed(Stage.REST)):
            layout = one.probe.layout
            if self.problem.global_batch not in (None, layout.global_batch):
                continue
            position = layout.active[0]
            if position not in best or one.samples_per_second >= best[position].samples_per_second:
                best[position] = one
        return best

    @cached_property
    def exchange(self) -> ExchangeCosts:
        """The gradient exchange time, in seconds, that isn't hidden by computation.

        Item `[h][k]` is the value for k devices on h hosts.
        """
        samples = [self._exchange_sample(split) for split in self.splits]
        costs = fit_exchange_costs(samples, self.problem.devices, len(set(self.hosts)))
        return self._with_link(costs, max((k for k, *_ in samples), default=1))

    def _with_link(self, costs: ExchangeCosts, widest: int) -> ExchangeCosts:
        """Raise predicted exchange times that are shorter than the speed of the link allows.

        Times of up to `widest` devices stay as they are, because they were measured.
        """
        # links between hosts aren't known
        if self.problem.link is None or not self.by_rows or not self.split_curves or costs[2:]:
            return costs
        within = list(costs[-1])
        for k in range(widest + 1, len(within)):
            within[k] = max(within[k - 1], within[k], self._unhidden_seconds(k, self.problem.link))
        return (costs[0], tuple(within))

    def _unhidden_seconds(self, ranks: int, link: KnownLink) -> float:
        """Estimate how much of the exchange time computation can't hide, in seconds.

        The exchange time follows from the speed of the link. `ranks` is the number of devices.
        """
        batch = self.problem.global_batch
        # what is left of the exchange on the device that hides most of it behind its computation
        left = []
        for curve in self.split_curves:
            # the batch is divided evenly; a free batch is as large as fits
            share = curve.limit if batch is None else max(1, batch // ranks)
            own_s = curve.curve.seconds(share)
            if self.problem.all_together:
                passes = math.ceil(share / curve.limit)
                each_s = shard_pass_seconds(self.problem.parameter_bytes, ranks, link)
                left.append(passes * each_s - HIDDEN_IN_SHARDS * own_s)
            else:
                sum_s = all_reduce_seconds(self.problem.gradient_bytes, ranks, link)
                left.append(sum_s - HIDDEN_BY_BACKWARD * own_s)
        return max(0.0, min(left))

    @cached_property
    def sync_seconds(self) -> float | None:
        """Exchange time, in seconds, of the measured split with the most devices.

        None if no split ran.
        """
        layouts = [split.probe.layout for split in self.splits]
        if not layouts:
            return None
        return self.exchange_seconds(max(layouts, key=lambda layout: len(layout.active)).active)

    def exchange_seconds(self, positions: Sequence[int]) -> float:
        """Return the predicted gradient exchange time between these devices, in seconds."""
        return self.exchange[self._count_hosts(positions)][len(positions)]

    def _count_hosts(self, positions: Sequence[int]) -> int:
        return len({self.hosts[i] for i in positions})

    def _exchange_sample(self, split: Timed) -> ExchangeSample:
        """Return the exchange time of a measured split.

        This is the part of its step time that exceeds the compute time of its slowest device.
        """
        active = split.probe.layout.active
        own = [split.device_seconds[i] for i in active]
        parts = [seconds for seconds in own if seconds]
        if len(parts) < len(active):
            parts = self.predict_parts(split)
        longest = max(parts, default=0.0)
        error = step_error(split) * split.step_seconds
        return len(active), self._count_hosts(active), split.step_seconds - longest, error

    def predict_parts(self, split: Timed) -> list[float]:
        """Return the predicted compute time of each device in a split, in seconds.

        Devices that were never measured are left out.
        """
        layout = split.probe.layout
        devices = [self.devices[i] for i in layout.active]
        return [
            device.seconds(layout, device.solo_curve) for device in devices if device.solo_curve
        ]

    def predicted_rate(self, layout: Layout) -> float:
        """Return the predicted throughput of a layout; 0 if one of its devices never ran."""
        devices = [self.devices[i] for i in layout.computing]
        times = []
        for device in devices:
            curve = device.split_curve if len(devices) > 1 else device.solo_curve
            if curve is None:
                return 0.0
            times.append(device.seconds(layout, curve))
        seconds = max(times) + self.exchange_seconds(layout.active)
        return layout.global_batch / seconds if seconds > 0 else 0.0

    # ------------------------------------------------------------------ memory

    def lay_out(self, shares: tuple[int, ...], known_to_fit: bool = False) -> Layout:
        """Return the layout with these rows per device, using gradient accumulation if needed.

        With `known_to_fit`, only micro-batches that are sure to fit in memory are used.
        """
        both = zip(self.devices, shares, strict=True)
        return layout_of(
            shares, tuple(device.rows_per_pass(share, known_to_fit) for device, share in both)
        )

    def lay_out_safely(self, shares: tuple[int, ...]) -> Layout | None:
        """Return a layout with these rows per device that is sure to fit in memory, or None.

        Its micro-batches may be smaller than those of `lay_out`.
        """
        layouts = (self.lay_out(shares, known_to_fit) for known_to_fit in (False, True))
        return next((layout for layout in layouts if self.is_sure_to_fit(layout)), None)

    def fits(self, layout: Layout) -> bool:
        """Whether a layout will probably fit in memory."""
        both = zip(layout.pass_rows, self.devices, strict=True)
        return all(rows <= device.guessed_rows for rows, device in both)

    def is_sure_to_fit(self, layout: Layout) -> bool:
        """Whether a layout is sure to fit in memory, judged by the batches that ran."""
        return all(layout.pass_rows[i] <= self.devices[i].certain_rows for i in layout.active)

    @cached_property
    def split_curves(self) -> tuple[DeviceCurve, ...]:
        """Compute time of each usable device by its number of rows, while the others compute too.

        Each curve comes with the most rows that the device should compute in one pass.
        """
        found = []
        for position in self.live:
            device = self.devices[position]
            if device.split_curve and device.largest_in_one_pass:
                found.append(DeviceCurve(position, device.split_curve, device.largest_in_one_pass))
        return tuple(found)

    @cached_property
    def holds_batch(self) -> bool:
        """Whether all devices together have enough memory for the requested global batch."""
        together = sum(device.limit for device in self.split_curves)
        if together >= (self.problem.global_batch or 0):
            return True
        return any(one.pass_rows for one in self.devices)
