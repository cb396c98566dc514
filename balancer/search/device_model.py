"""A model of one device: its step times and its limits.

The step times are by number of rows, and the limits are for the rows of one pass. Each limit is a
multiple of the quantum (the unit in which shares are assigned); 0 leaves the device out. The name
of a limit says what it is based on:

    requested   the request: largest share, fixed global batch, largest global batch
    certain     memory: what ran, or a little more if memory is far from full
    guessed     memory: the batch at which the memory line reaches the device's memory; after a
                failure, a batch between the largest that ran and the smallest that failed; if
                bytes are unknown, a split gets no more rows than ran
    trusted     time: at most the guessed limit, and only as far above the batches that ran as the
                curve can be trusted; if a fixed batch needs larger shares, this limit is ignored

Solo probes have other limits (`guessed_alone_rows`, `trusted_alone_rows`), because a failure costs
less in a solo probe than in a split. `largest_in_one_pass` is the guessed limit, or less if two
smaller passes are faster.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from evener.shares.curves import Curve, PassCurve, step_in_passes
from evener.shares.waterfill import DeviceCurve, single_best

from ..types import Layout, Problem
from .model.evidence import CLEAR, DeviceEvidence
from .model.memory import BLIND_GROWTH, SAFE_GROWTH, UNBOUNDED
from .model.optimistic import bend_is_open, optimistic_curve
from .model.step_time import LEVEL, Point, fit_curve, fit_pass_overhead, merge_points
from .time_left import TimeLeft

# maximum factor by which a batch may exceed the largest that ran; a recorded kernel has its peak
# within that range
STRIDE = 32


class DeviceModel:
    """A model of one device: step time by batch, and how many rows fit in its memory."""

    def __init__(
        self,
        position: int,
        problem: Problem,
        time: TimeLeft,
        evidence: Sequence[DeviceEvidence],
        group: Sequence[int],
    ) -> None:
        """Build the model from the measurements of the device and of equally fast devices.

        `group` lists the positions of all devices that are equally fast within noise, including
        this one. Their timings are combined into one curve.
        """
        self.position = position
        self.quantum = problem.multiple_of
        self.evidence = evidence[position]
        self.memory = self.evidence.memory
        self.lost = self.evidence.lost
        self.is_unusable = self.evidence.is_unusable(self.quantum)
        self._problem = problem
        self._time = time
        self._group = [evidence[i] for i in group]
        self._among = sum(not one.is_unusable(self.quantum) for one in evidence)

    # ------------------------------------------------------------------ time

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Measured step times of this device when it runs alone."""
        return self.evidence.solo_points(self._among)

    @cached_property
    def group_points(self) -> tuple[Point, ...]:
        """Measured step times, alone, of all devices that are as fast as this one."""
        return tuple(point for one in self._group for point in one.solo_points(self._among))

    @cached_property
    def solo_curve(self) -> Curve | None:
        """Step time by batch when the device trains alone; None before its first probe."""
        return fit_curve(self.group_points, self._among)

    @cached_property
    def split_curve(self) -> Curve | None:
        """Compute time by rows when the device trains together with others.

        The curve is fitted to solo measurements and to the device's compute time in measured
        splits. None before the first probe.
        """
        points: list[Point] = []
        for one in self._group:
            points += dict.fromkeys((*one.solo_points(self._among), *one.in_splits))
        return fit_curve(points, self._among)

    @cached_property
    def optimistic(self) -> Curve | None:
        """Lower bound on the step time by batch, from the measurements so far.

        It is the fastest curve that they don't rule out, and shows which batches are worth
        measuring next. None before the first probe.
        """
        if self.solo_curve is None:
            return None
        return optimistic_curve(self.group_points, self.solo_curve)

    def seconds(self, layout: Layout, curve: Curve) -> float:
        """Return the seconds a device needs for its rows of a layout, read from `curve`."""
        share = layout.shares[self.position]
        return step_in_passes(curve, share, layout.passes(self.position), self.extra_seconds)

    # ------------------------------------------------------------------ by request and by memory

    @cached_property
    def requested_rows(self) -> int:
        """The most rows that the request allows on one device."""
        problem = self._problem
        limits = (problem.largest_share, problem.global_batch, problem.max_global_batch)
        given = [limit for limit in limits if limit is not None]
        return min(given, default=UNBOUNDED) // self.quantum * self.quantum

    @cached_property
    def guessed_rows(self) -> int:
        """The most rows of one pass that probably fit in memory; 0 if unusable."""
        if self.is_unusable:
            return 0
        # the rows of a fixed batch have to be computed somewhere
        bold = self._problem.global_batch is not None
        return self.memory.largest_in_split(self.requested_rows, self.quantum, bold)

    @cached_property
    def certain_rows(self) -> int:
        """The most rows per pass known to fit: they ran, or leave plenty of memory free."""
        return self.memory.largest_safe(self.requested_rows, self.quantum)

    # ------------------------------------------------------------------ by time, and by what ran

    @cached_property
    def trusted_alone_rows(self) -> int:
        """The largest batch that a probe of this device alone may try next.

        It depends on memory, on the remaining time, and on the largest batch that ran. 0 before the
        first probe.
        """
        if self.solo_curve is None:
            return 0
        growth = self._growth_factor(self.solo_curve)
        stride = STRIDE if math.isinf(growth) else min(BLIND_GROWTH, growth)
        by_memory = self.memory.largest_to_try(self.requested_rows, self.quantum)
        return min(self.guessed_alone_rows, by_memory, self._times_what_ran(stride))

    @cached_property
    def guessed_alone_rows(self) -> int:
        """The largest batch for which `optimistic` may be used to predict the device alone.

        0 as long as no batch has run.
        """
        if self.solo_curve is None or self.optimistic is None or not self.memory.largest_ran:
            return 0
        by_memory = self.memory.largest_to_try(self.requested_rows, self.quantum, optimistic=True)
        # the times are so noisy that the curve may in fact be level
        if not self.optimistic.slope:
            return by_memory
        return self._limit_by_time(self.solo_curve, by_memory)

    def trusted_rows(self, curve: Curve | PassCurve, limit: int) -> int:
        """Return the largest batch, up to `limit`, for which a curve is reliable.

        A curve is only extrapolated to a multiple of the largest batch that ran. If it was flat so
        far, the remaining time limits that multiple.
        """
        if self._problem.global_batch is None:
            limit = self._limit_by_time(curve, limit)
        if not self.memory.largest_ran:
            return limit
        return min(limit, self._times_what_ran(min(BLIND_GROWTH, self._growth_factor(curve))))

    def _times_what_ran(self, growth: float) -> int:
        return max(int(growth * self.memory.largest_ran) // self.quantum, 1) * self.quantum

    def _growth_factor(self, curve: Curve | PassCurve) -> float:
        """Return how many times larger than the largest batch that ran the next one may be.

        Infinite if the curve rises, because it then predicts the time of larger batches. Otherwise,
        the remaining time limits the factor.
        """
        smallest = self.evidence.alone[0].batch if self.evidence.alone else 0
        first = curve.seconds(smallest)
        last = curve.seconds(self.memory.largest_ran)
        # a rising curve predicts the time of a larger batch; beyond a level curve, time may grow in
        # proportion to the batch, so the time left limits the factor
        rises = last > (1 + LEVEL + CLEAR * curve.error) * first
        return math.inf if rises else self._time.growth(last)

    def _limit_by_time(self, curve: Curve | PassCurve, limit: int) -> int:
        """Return the largest batch up to `limit` with a short enough step for the time left."""
        # not reduced below the largest batch that ran
        if math.isinf(self._time.seconds):
            return limit
        longest = max(
            self._time.longest_step(), SAFE_GROWTH * curve.seconds(self.memory.largest_ran)
        )
        quick = curve.largest(longest, limit, self.quantum)
        return max(self.quantum, min(limit, max(self.memory.largest_ran, quick)))

    # ------------------------------------------------------------------ passes

    @property
    def _may_use_passes(self) -> bool:
        """Whether the device may compute its rows by gradient accumulation, in several passes."""
        fixed = self._problem.global_batch is not None
        # a free batch is reduced instead; after a failed probe with passes, the passes may be the
        # cause
        return self._problem.micro and fixed and not self.evidence.undivided

    @cached_property
    def pass_rows(self) -> int:
        """The best micro-batch for gradient accumulation; 0 if it isn't used.

        This is the largest that fits, or a smaller one if that is clearly faster per row.
        """
        if not self._may_use_passes or self.solo_curve is None:
            return 0
        curve = self.solo_curve
        rows = self.trusted_rows(curve, self.guessed_rows)
        points = merge_points(self.group_points)
        fewer = {p.batch: p.seconds for p in points if self.quantum <= p.batch <= rows}
        # the end of a level stretch, if it is known
        end = curve.batches[-1]
        if curve.simple and not bend_is_open(points, curve) and self.quantum <= end <= rows:
            fewer.setdefault(int(end), curve.times[-1])
        if not fewer:
            return rows
        best = max(fewer, key=lambda batch: batch / fewer[batch])
        gains = best / fewer[best] > (1 + LEVEL) * rows / curve.seconds(rows)
        return best // self.quantum * self.quantum if gains else rows

    @cached_property
    def largest_in_one_pass(self) -> int:
        """The most rows to compute in one pass; above, two smaller passes are faster or needed."""
        rows = self.pass_rows
        if not rows or rows >= self.guessed_rows or self.split_curve is None:
            return self.guessed_rows
        most = find_largest_in_one_pass(
            self.split_curve, rows, self.guessed_rows, self.extra_seconds
        )
        return most // self.quantum * self.quantum

    @cached_property
    def extra_seconds(self) -> float:
        """Overhead in seconds of each further gradient-accumulation pass; 0 if not measured.

        Negative if a part of the step, such as the optimizer's, isn't repeated.
        """
        split = [point for one in self._group for point in one.split_in_passes]
        alone = [point for one in self._group for point in one.alone_in_passes]
        for points, curve in ((split, self.split_curve), (alone, self.solo_curve)):
            if points and curve and self.pass_rows:
                return fit_pass_overhead(points, curve, self.pass_rows)
        return 0.0

    def in_passes(self, device: DeviceCurve) -> DeviceCurve:
        """Extend a device's curve to more rows than fit in memory, by gradient accumulation.

        `device` is returned unchanged if that can't be used, or if its curve includes it already.
        """
        rows = min(self.pass_rows, device.limit)
        if not rows or not isinstance(device.curve, Curve):
            return device
        fits = max(rows, min(device.limit, self.guessed_rows))
        passes = PassCurve(device.curve, device.limit, rows, self.extra_seconds, fits)
        most = max(device.limit, self._problem.global_batch or 0)
        return DeviceCurve(self.position, passes, most)

    def with_best_passes(self, curve: Curve, limit: int) -> DeviceCurve:
        """Return the device's curve with gradient accumulation in the fastest micro-batch.

        Used to predict the requested global batch on this device alone. The curve is unchanged if
        no global batch was requested, or if one pass is fastest.
        """
        device = DeviceCurve(self.position, curve, limit)
        batch = self._problem.global_batch
        if not self._may_use_passes or batch is None:
            return device
        best = single_best(device, self.quantum)
        if best is None:
            return device
        rows = best.global_batch
        at_once = find_largest_in_one_pass(curve, rows, limit, self.extra_seconds)
        if at_once >= batch:
            return device
        return DeviceCurve(
            self.position, PassCurve(curve, at_once, rows, self.extra_seconds, at_once), batch
        )

    def rows_per_pass(self, share: int, surely: bool) -> int:
        """Return the micro-batch for a share; the share itself if one pass is enough.

        If `surely` is set, only sizes that are known to fit in memory are used.
        """
        if surely:
            at_once = self.certain_rows
            fits = self.certain_rows
            rows = min(self.certain_rows, self.pass_rows)
        else:
            at_once = self.largest_in_one_pass
            fits = self.guessed_rows
            rows = self.pass_rows
        if not rows or share <= at_once or self.solo_curve is None:
            return share
        passes = PassCurve(self.solo_curve, at_once, rows, self.extra_seconds, fits).passes(share)
        return -(-share // passes)


def find_largest_in_one_pass(curve: Curve, rows: int, limit: int, extra: float) -> int:
    """Return the largest number of rows that isn't faster in two passes than in one.

    Searched from `rows` to `limit`. `extra` is the overhead of a second pass in seconds.
    """
    shares = range(rows, max(rows, limit))

    def two_are_faster(share: int) -> bool:
        return curve.seconds(share) > step_in_passes(curve, share, 2, extra)

    first = bisect_left(shares, True, key=two_are_faster)
    return shares[first] if first < len(shares) else max(rows, limit)
