"""A model of one device: its step time as a function of its rows, and how many rows it can take.

Limits are for the rows of one pass, which are the rows that a device computes at once. Each limit
is a multiple of the quantum, the unit in which shares are assigned. A limit of 0 means that the
device can't be used. The name of a limit says what it is based on:

    requested   the request: largest share, fixed global batch, largest global batch
    certain     memory: what ran, or a little more if memory is far from full
    guessed     memory: the batch at which the predicted peak memory reaches the device's memory;
                after a failure, a batch between the largest that ran and the smallest that failed;
                if bytes are unknown, a split gets no more rows than ran
    trusted     time: at most the guessed limit, and only as far above the batches that ran as the
                curve can be trusted; if a fixed batch needs larger shares, this limit is ignored

Probes of a single device have limits of their own (`guessed_alone_rows`, `trusted_alone_rows`),
because a failure costs less there than in a step over several devices. `largest_in_one_pass` is the
guessed limit, or less if two smaller passes are faster.
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
from .model.lower_bound import lower_bound_curve, plateau_end_is_unknown
from .model.memory import BLIND_GROWTH, SAFE_GROWTH, UNBOUNDED
from .model.step_time import FLAT_TOLERANCE, Point, fit_curve, fit_pass_overhead, merge_points
from .time_left import TimeLeft

# maximum factor by which a batch may exceed the largest that ran; a recorded kernel has its peak
# within that range
STRIDE = 32


class DeviceModel:
    """Predicts a device's step time for any number of rows, and how many rows fit in its memory."""

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
        """Measured step times of this device, without gradient exchange."""
        return self.evidence.solo_points(self._among)

    @cached_property
    def group_points(self) -> tuple[Point, ...]:
        """Measured step times of this and all equally fast devices, without gradient exchange."""
        return tuple(point for one in self._group for point in one.solo_points(self._among))

    @cached_property
    def solo_curve(self) -> Curve | None:
        """Step time as a function of the batch, if the device trains on its own.

        None before its first probe.
        """
        return fit_curve(self.group_points, self._among)

    @cached_property
    def split_curve(self) -> Curve | None:
        """Compute time as a function of the rows if the device trains together with others.

        The curve is fitted to measurements of the device on its own, and to its compute time in
        measured steps over several devices. None before the first probe.
        """
        points: list[Point] = []
        for one in self._group:
            points += dict.fromkeys((*one.solo_points(self._among), *one.in_splits))
        return fit_curve(points, self._among)

    @cached_property
    def lower_bound(self) -> Curve | None:
        """Lower bound on the step time when only this device is used, as a function of the batch.

        It is the lowest curve that the measurements don't rule out. Batches at which it is far
        below `solo_curve` are worth measuring. None before the first probe.
        """
        if self.solo_curve is None:
            return None
        return lower_bound_curve(self.group_points, self.solo_curve)

    def seconds(self, layout: Layout, curve: Curve) -> float:
        """Return how many seconds the device takes for its share of a layout, read from a curve."""
        share = layout.shares[self.position]
        return step_in_passes(curve, share, layout.passes(self.position), self.extra_seconds)

    # ------------------------------------------------------------------ limits by memory

    @cached_property
    def requested_rows(self) -> int:
        """The most rows that the request allows on one device."""
        problem = self._problem
        limits = (problem.largest_share, problem.global_batch, problem.max_global_batch)
        given = [limit for limit in limits if limit is not None]
        return min(given, default=UNBOUNDED) // self.quantum * self.quantum

    @cached_property
    def guessed_rows(self) -> int:
        """The most rows of one pass that probably fit in memory; 0 if the device is unusable."""
        if self.is_unusable:
            return 0
        # the rows of a fixed batch have to be computed somewhere
        bold = self._problem.global_batch is not None
        return self.memory.largest_in_split(self.requested_rows, self.quantum, bold)

    @cached_property
    def certain_rows(self) -> int:
        """The most rows of one pass that are sure to fit in memory.

        A pass of this many rows has run, or one of slightly fewer rows that left plenty of memory.
        """
        return self.memory.largest_safe(self.requested_rows, self.quantum)

    # ------------------------------------------------------------------ limits by time

    @cached_property
    def trusted_alone_rows(self) -> int:
        """The largest batch that a probe of only this device may try next.

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
        """The largest batch for which `lower_bound` may predict a step of only this device.

        0 as long as no batch has run.
        """
        if self.solo_curve is None or self.lower_bound is None or not self.memory.largest_ran:
            return 0
        by_memory = self.memory.largest_to_try(
            self.requested_rows, self.quantum, just_below_failure=True
        )
        # the times are so noisy that the step time may be constant
        if not self.lower_bound.slope:
            return by_memory
        return self._limit_by_time(self.solo_curve, by_memory)

    def trusted_rows(self, curve: Curve | PassCurve, limit: int) -> int:
        """Return the largest batch, up to `limit`, for which a curve of the step time is reliable.

        Extrapolation ends at a multiple of the largest batch that ran. If the curve hasn't risen
        yet, the remaining time limits that multiple. If the global batch is free, steps must also
        be short enough for the remaining time.
        """
        if self._problem.global_batch is None:
            limit = self._limit_by_time(curve, limit)
        if not self.memory.largest_ran:
            return limit
        return min(limit, self._times_what_ran(min(BLIND_GROWTH, self._growth_factor(curve))))

    def _times_what_ran(self, growth: float) -> int:
        return max(int(growth * self.memory.largest_ran) // self.quantum, 1) * self.quantum

    def _growth_factor(self, curve: Curve | PassCurve) -> float:
        """Return how many times larger the next batch may be than the largest batch that ran.

        Infinite if the curve rises, because it then predicts the time of larger batches. If it is
        flat, the step time is assumed to grow in proportion to the batch beyond the largest one
        that ran. The time left then limits the factor.
        """
        smallest = self.evidence.alone[0].batch if self.evidence.alone else 0
        first = curve.seconds(smallest)
        last = curve.seconds(self.memory.largest_ran)
        rises = last > (1 + FLAT_TOLERANCE + CLEAR * curve.error) * first
        return math.inf if rises else self._time.growth(last)

    def _limit_by_time(self, curve: Curve | PassCurve, limit: int) -> int:
        """Return the largest batch, up to `limit`, whose step is short enough for the time left.

        The largest batch that ran is always short enough.
        """
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
        return self._problem.micro and fixed and not self.evidence.passes_failed

    @cached_property
    def pass_rows(self) -> int:
        """The best micro-batch for gradient accumulation; 0 if the device can't use it.

        It is the largest micro-batch that fits, or a smaller one if that is clearly faster per row.
        """
        if not self._may_use_passes or self.solo_curve is None:
            return 0
        curve = self.solo_curve
        rows = self.trusted_rows(curve, self.guessed_rows)
        points = merge_points(self.group_points)
        fewer = {p.batch: p.seconds for p in points if self.quantum <= p.batch <= rows}
        # the end of a plateau, if it is known
        end = curve.batches[-1]
        if (
            curve.simple
            and not plateau_end_is_unknown(points, curve)
            and self.quantum <= end <= rows
        ):
            fewer.setdefault(int(end), curve.times[-1])
        if not fewer:
            return rows
        best = max(fewer, key=lambda batch: batch / fewer[batch])
        gains = best / fewer[best] > (1 + FLAT_TOLERANCE) * rows / curve.seconds(rows)
        return best // self.quantum * self.quantum if gains else rows

    @cached_property
    def largest_in_one_pass(self) -> int:
        """The most rows to compute in one pass.

        More rows wouldn't fit, or would take less time in two smaller passes.
        """
        rows = self.pass_rows
        if not rows or rows >= self.guessed_rows or self.split_curve is None:
            return self.guessed_rows
        most = find_largest_in_one_pass(
            self.split_curve, rows, self.guessed_rows, self.extra_seconds
        )
        return most // self.quantum * self.quantum

    @cached_property
    def extra_seconds(self) -> float:
        """Overhead in seconds of each additional gradient-accumulation pass; 0 if not measured.

        Negative if a part of the step, such as the optimizer's, isn't repeated in each pass.
        """
        split = [point for one in self._group for point in one.split_in_passes]
        alone = [point for one in self._group for point in one.alone_in_passes]
        for points, curve in ((split, self.split_curve), (alone, self.solo_curve)):
            if points and curve and self.pass_rows:
                return fit_pass_overhead(points, curve, self.pass_rows)
        return 0.0

    def in_passes(self, device: DeviceCurve) -> DeviceCurve:
        """Extend a curve of this device to more rows than fit in memory, by gradient accumulation.

        Returns the curve unchanged if gradient accumulation can't be used, or is included already.
        """
        rows = min(self.pass_rows, device.limit)
        if not rows or not isinstance(device.curve, Curve):
            return device
        fits = max(rows, min(device.limit, self.guessed_rows))
        passes = PassCurve(device.curve, device.limit, rows, self.extra_seconds, fits)
        most = max(device.limit, self._problem.global_batch or 0)
        return DeviceCurve(self.position, passes, most)

    def with_best_passes(self, curve: Curve, limit: int) -> DeviceCurve:
        """Return the device's curve, with gradient accumulation where that is faster than one pass.

        It predicts how long a requested global batch takes on only this device, in passes with the
        fastest micro-batch. If no global batch was requested, or if one pass is fastest, the result
        is `curve` up to `limit`.
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

    def rows_per_pass(self, share: int, known_to_fit: bool) -> int:
        """Return the micro-batch for a share; the share itself if one pass is enough.

        With `known_to_fit`, only micro-batches that are sure to fit in memory are used.
        """
        if known_to_fit:
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


def find_largest_in_one_pass(curve: Curve, rows: int, limit: int, pass_overhead: float) -> int:
    """Return the largest number of rows for which one pass is at least as fast as two.

    It is between `rows` and `limit`. `pass_overhead` is the overhead of a second pass, in seconds.
    """
    shares = range(rows, max(rows, limit))

    def two_are_faster(share: int) -> bool:
        return curve.seconds(share) > step_in_passes(curve, share, 2, pass_overhead)

    first = bisect_left(shares, True, key=two_are_faster)
    return shares[first] if first < len(shares) else max(rows, limit)
