"""Predict the largest batch that fits in a device's memory.

Peak memory is extrapolated by the line through the two largest measured batches, the memory line.
The predicted limit is the batch at which the line reaches the size of the device's memory.

If that batch runs out of memory, the line is wrong. From then on, the next attempt is between the
largest batch that ran and the smallest that failed. It is a quarter of the way up, because a
failure costs more time than a batch that runs. If the memory use in bytes is unknown, the batch
grows by a constant factor until it fails.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

import msgspec

from .step_time import FLAT_TOLERANCE, SAME_BATCH, WIDE_GAP

# fraction of the predicted batch left as headroom: allocators round up, and a restart takes 3 s
MARGIN = 0.003
# factor over what ran, up to which a batch may grow if bytes are unknown, and up to which a curve
# is trusted
BLIND_GROWTH = 8
# fraction of the predicted largest batch that is safe without having run, and of the free memory
# that is used if the memory line bends upwards
SAFE_SHARE = 0.8
# factor by which a batch may safely exceed the largest that ran, in bytes and in time; steps that
# differ by less don't show how their tuning grows
SAFE_GROWTH = 1.25
UNBOUNDED = 1 << 30  # samples


class Memory(msgspec.Struct, frozen=True, dict=True):
    """A device's peak memory by batch, and the batches that ran or ran out of memory.

    `points` are pairs of a batch and its peak in bytes, in increasing order of batch.
    `limit_bytes` is the size of the device's memory; None if unknown.
    """

    limit_bytes: int | None
    points: tuple[tuple[int, int], ...] = ()
    largest_ran: int = 0
    smallest_failed: int | None = None
    failure_count: int = 0  # number of times that it ran out of memory

    @cached_property
    def distinct_points(self) -> tuple[tuple[int, int], ...]:
        """The measured points, without those whose batch is only slightly smaller than another's.

        A line through two nearly equal batches would be meaningless.
        """
        kept: list[tuple[int, int]] = []
        for point in reversed(self.points):
            if not kept or point[0] <= (1 - FLAT_TOLERANCE) * kept[-1][0]:
                kept.append(point)
        if len(kept) > 1:
            return tuple(reversed(kept))
        return self.points[:1] + self.points[1:][-1:]

    @property
    def line(self) -> tuple[float, float] | None:
        """Intercept in bytes and slope in bytes per row of the peak memory.

        The line goes through the points of the two largest batches that aren't nearly equal. None
        if there are fewer than two such batches.
        """
        if len(self.distinct_points) < 2:
            return None
        (b0, m0), (b1, m1) = self.distinct_points[-2:]
        slope = max(0.0, (m1 - m0) / (b1 - b0))
        return m1 - slope * b1, slope

    def predict_largest(self) -> int | None:
        """Return the largest batch that is predicted to fit in memory.

        None if the device's memory is unknown, or if memory use doesn't grow with the batch.
        """
        line = self.line
        if line is None or self.limit_bytes is None:
            return None
        _, slope = line
        if slope <= 0:
            return None
        last, used = self.points[-1]
        free = self.limit_bytes - used
        if free > 0:
            # if the memory per sample has increased, it is assumed to increase by as much again
            bend = self._slope_increase()
            part = SAFE_SHARE if bend else 1.0
            most = int(last + free / (slope + bend) * part)
        else:
            most = int(last + free / slope)
        return max(0, most - int(MARGIN * most))

    def _slope_increase(self) -> float:
        """Return how much the bytes per row have increased at the largest batches.

        This is the slope between the last two of three points, minus the slope between the first
        two. 0 if it is small, or with fewer points.
        """
        if len(self.distinct_points) < 3:
            return 0.0
        (b0, m0), (b1, m1), (b2, m2) = self.distinct_points[-3:]
        before, last = (m1 - m0) / (b1 - b0), (m2 - m1) / (b2 - b1)
        return last - before if last > before * (1 + FLAT_TOLERANCE) else 0.0

    def largest_in_proportion(self) -> int | None:
        """Return the largest batch that fits, assuming that all memory grows in proportion to it.

        This is a cautious assumption, because a part of the memory doesn't grow. Used to choose the
        second batch: None unless exactly one batch has run and none has failed.
        """
        if self.smallest_failed is not None or len(self.points) != 1 or self.limit_bytes is None:
            return None
        rows, used = self.points[0]
        return int(rows * self.limit_bytes / used) if used else None

    def largest_to_try(self, cap: int, quantum: int = 1, just_below_failure: bool = False) -> int:
        """Return the largest batch that a probe of only this device should try.

        It is the predicted limit or, without a prediction, a multiple of the largest batch that
        ran. After a failure, it lies between the largest batch that ran and the smallest that
        failed. 0 if no batch can fit.

        - `cap`: the most rows to return.
        - `quantum`: the result is a multiple of it.
        - `just_below_failure`: after a single failure, assume that a slightly smaller batch fits.
        """
        narrow = max(quantum, SAME_BATCH * self.largest_ran)
        settled = (
            self.smallest_failed is not None and self.smallest_failed - self.largest_ran <= narrow
        )
        if settled or cap <= self.largest_ran:
            return min(self.largest_ran, cap) // quantum * quantum
        guess = self.predict_largest()
        if guess is not None and (self.smallest_failed is None or guess < self.smallest_failed):
            return max(self.largest_ran, min(guess, cap)) // quantum * quantum
        if self.smallest_failed is None:
            wanted = self.largest_ran * BLIND_GROWTH
        elif just_below_failure and self.failure_count < 2:
            wanted = self.smallest_failed - quantum
        else:
            wanted = self._middle(self.smallest_failed)
        return min(cap, max(quantum, wanted)) // quantum * quantum

    def largest_in_split(self, cap: int, quantum: int = 1, beyond_largest_ran: bool = False) -> int:
        """Return the largest micro-batch to try in a step over several devices.

        It is the predicted limit. Without a prediction, it is the largest batch that ran or, with
        `beyond_largest_ran`, a larger one. The result is a multiple of `quantum`, and at most
        `cap`.
        """
        unknown = self.limit_bytes is None or self.line is None
        if (unknown and not beyond_largest_ran) or self._limit_is_refuted:
            return min(self.largest_ran, cap) // quantum * quantum
        return self.largest_to_try(cap, quantum)

    @property
    def _limit_is_refuted(self) -> bool:
        """Whether failures have shown that the limit predicted by the memory line is too high.

        This takes at least two failures. It is so if the limit isn't below the smallest batch that
        failed, or if no limit can be predicted.
        """
        if self.failure_count < 2:
            return False
        guess = self.predict_largest()
        return guess is None or self.smallest_failed is None or guess >= self.smallest_failed

    def largest_safe(self, cap: int, quantum: int = 1) -> int:
        """Return the largest batch that is sure to fit.

        It either ran, or is slightly larger than one that ran and is predicted to need clearly less
        than the device's memory. The result is a multiple of `quantum`, and at most `cap`.
        """
        safe = self.largest_ran
        guess = self.predict_largest()
        if self.smallest_failed is None and guess is not None and self.largest_ran:
            safe = max(safe, min(int(guess * SAFE_SHARE), int(self.largest_ran * SAFE_GROWTH)))
        return min(safe, cap) // quantum * quantum

    def largest_within(self, limit_bytes: float) -> int:
        """Return the largest batch that needs at most `limit_bytes`.

        Memory is assumed to be linear between the measured points and beyond them. There must be at
        least one point. UNBOUNDED if memory doesn't grow with the batch.
        """
        points = self.points if len(self.points) > 1 else ((0, 0), *self.points)
        above = bisect_left(points, limit_bytes, key=lambda point: point[1])
        right = min(max(1, above), len(points) - 1)
        (b0, m0), (b1, m1) = points[right - 1 : right + 1]
        slope = (m1 - m0) / (b1 - b0)
        if slope <= 0:
            return UNBOUNDED if limit_bytes >= m1 else 0
        return max(0, int(b1 + (limit_bytes - m1) / slope))

    def _middle(self, failed: int) -> int:
        if self.limit_bytes is None and self.largest_ran and failed > WIDE_GAP * self.largest_ran:
            return int((self.largest_ran * failed) ** 0.5)
        return self.largest_ran + (failed - self.largest_ran) // 4


def read_memory(
    limit_bytes: int | None,
    points: Mapping[int, int],
    ran: Iterable[int],
    out_of_memory: Collection[int],
) -> Memory:
    """Create the memory model of a device from its measurements.

    - `limit_bytes`: size of the device's memory; None if unknown.
    - `points`: peak bytes by batch.
    - `ran`: the batches that fit in memory.
    - `out_of_memory`: the batches that ran out of memory.
    """
    failed = min(out_of_memory, default=None)
    largest = max((batch for batch in ran if failed is None or batch < failed), default=0)
    return Memory(limit_bytes, tuple(sorted(points.items())), largest, failed, len(out_of_memory))
