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
    """What is known about one device: time curves, memory, and how many rows to give it."""

    def __init__(
        self,
        position: int,
        problem: Problem,
        time: TimeLeft,
        evidence: Sequence[DeviceEvidence],
        group: Sequence[int],
    ) -> None:
        """Read the device's own evidence, and the time points of the devices in its group.

        `group` holds the positions of devices whose speed can't be distinguished, including this
        one.
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
        """Time points of this device alone."""
        return self.evidence.solo_points(self._among)

    @cached_property
    def group_points(self) -> tuple[Point, ...]:
        """Time points of all devices in the group, each measured alone."""
        return tuple(point for one in self._group for point in one.solo_points(self._among))

    @cached_property
    def solo_curve(self) -> Curve | None:
        """Step time by batch for the device alone; None before its first probe."""
        return fit_curve(self.group_points, self._among)

    @cached_property
    def split_curve(self) -> Curve | None:
        """Compute time by share within a split, also fitted to the steps of measured splits."""
        points: list[Point] = []
        for one in self._group:
            points += dict.fromkeys((*one.solo_points(self._among), *one.in_splits))
        return fit_curve(points, self._among)

    @cached_property
    def optimistic(self) -> Curve | None:
        """The fastest curve that the solo measurements still allow; None before the first probe."""
        if self.solo_curve is None:
            return None
        return optimistic_curve(self.group_points, self.solo_curve)

    def seconds(self, layout: Layout, curve: Curve) -> float:
        """Return the seconds that a curve predicts for the device's share of a layout."""
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
        """The most rows of a pass expected to fit in memory; 0 if the device is unusable."""
        if self.is_unusable:
            return 0
        # the rows of a fixed batch have to be computed somewhere
        bold = self._problem.global_batch is not None
        return self.memory.largest_in_split(self.requested_rows, self.quantum, bold)

    @cached_property
    def certain_rows(self) -> int:
        """The most rows in one pass that surely fit in memory."""
        return self.memory.largest_safe(self.requested_rows, self.quantum)

    # ------------------------------------------------------------------ by time, and by what ran

    @cached_property
    def trusted_alone_rows(self) -> int:
        """The largest batch worth trying on the device alone, close enough to what ran before."""
        if self.solo_curve is None:
            return 0
        growth = self._growth_factor(self.solo_curve)
        stride = STRIDE if math.isinf(growth) else min(BLIND_GROWTH, growth)
        by_memory = self.memory.largest_to_try(self.requested_rows, self.quantum)
        return min(self.guessed_alone_rows, by_memory, self._times_what_ran(stride))

    @cached_property
    def guessed_alone_rows(self) -> int:
        """The largest batch on the device alone for which the optimistic curve is used."""
        if self.solo_curve is None or self.optimistic is None or not self.memory.largest_ran:
            return 0
        by_memory = self.memory.largest_to_try(self.requested_rows, self.quantum, optimistic=True)
        # the times are so noisy that the curve may in fact be level
        if not self.optimistic.slope:
            return by_memory
        return self._limit_by_time(self.solo_curve, by_memory)

    def trusted_rows(self, curve: Curve | PassCurve, limit: int) -> int:
        """Return up to how many rows a curve may be trusted, at most `limit`."""
        if self._problem.global_batch is None:
            limit = self._limit_by_time(curve, limit)
        if not self.memory.largest_ran:
            return limit
        return min(limit, self._times_what_ran(min(BLIND_GROWTH, self._growth_factor(curve))))

    def _times_what_ran(self, growth: float) -> int:
        return max(int(growth * self.memory.largest_ran) // self.quantum, 1) * self.quantum

    def _growth_factor(self, curve: Curve | PassCurve) -> float:
        """Return how many times as large as the largest that ran a batch may be.

        Infinite on a rising curve, which predicts the time of larger batches.
        """
        smallest = self.evidence.alone[0].batch if self.evidence.alone else 0
        first = curve.seconds(smallest)
        last = curve.seconds(self.memory.largest_ran)
        # a rising curve predicts the time of a larger batch; beyond a level curve, time may grow in
        # proportion to the batch, so the time left limits the factor
        rises = last > (1 + LEVEL + CLEAR * curve.error) * first
        return math.inf if rises else self._time.growth(last)

    def _limit_by_time(self, curve: Curve | PassCurve, limit: int) -> int:
        """Reduce `limit` to the batch whose step the remaining time allows."""
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
        """Whether the device may split its share into several passes."""
        fixed = self._problem.global_batch is not None
        # a free batch is reduced instead; after a failed probe with passes, the passes may be the
        # cause
        return self._problem.micro and fixed and not self.evidence.undivided

    @cached_property
    def pass_rows(self) -> int:
        """Rows per pass for gradient accumulation; 0 if shares are computed in one pass.

        Fewer rows than fit are used if they give clearly more samples/s.
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
        """The largest share that is at least as fast in one pass as in two."""
        rows = self.pass_rows
        if not rows or rows >= self.guessed_rows or self.split_curve is None:
            return self.guessed_rows
        most = find_largest_in_one_pass(
            self.split_curve, rows, self.guessed_rows, self.extra_seconds
        )
        return most // self.quantum * self.quantum

    @cached_property
    def extra_seconds(self) -> float:
        """Seconds that each further pass adds to a step; 0 if none was measured.

        Negative if a part of the step, such as the optimizer's, isn't repeated.
        """
        split = [point for one in self._group for point in one.split_in_passes]
        alone = [point for one in self._group for point in one.alone_in_passes]
        for points, curve in ((split, self.split_curve), (alone, self.solo_curve)):
            if points and curve and self.pass_rows:
                return fit_pass_overhead(points, curve, self.pass_rows)
        return 0.0

    def in_passes(self, device: DeviceCurve) -> DeviceCurve:
        """Return the device's curve for shares that may exceed its memory, in several passes."""
        rows = min(self.pass_rows, device.limit)
        if not rows or not isinstance(device.curve, Curve):
            return device
        fits = max(rows, min(device.limit, self.guessed_rows))
        passes = PassCurve(device.curve, device.limit, rows, self.extra_seconds, fits)
        most = max(device.limit, self._problem.global_batch or 0)
        return DeviceCurve(self.position, passes, most)

    def with_best_passes(self, curve: Curve, limit: int) -> DeviceCurve:
        """Return the device's curve for any share, with passes of the size that is fastest alone.

        A free batch, or one that is fastest in one pass, gets the curve unchanged.
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
        """Return the rows of each pass of a share; the share itself if one pass is enough.

        `surely` allows only passes that certainly fit in memory.
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
    """Return the largest share that one pass computes at least as fast as two.

    Shares from `rows` to `limit` are searched. `extra` is the overhead of a second pass in seconds.
    """
    shares = range(rows, max(rows, limit))

    def two_are_faster(share: int) -> bool:
        return curve.seconds(share) > step_in_passes(curve, share, 2, extra)

    first = bisect_left(shares, True, key=two_are_faster)
    return shares[first] if first < len(shares) else max(rows, limit)
