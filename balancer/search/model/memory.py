"""The number of samples that fit: a device's line of bytes(batch), the batches that ran or failed,
the next guess.

The guess is where the line through the two largest distinct batches meets the device's memory. A
guess that failed refutes the line; from then on a quarter of the gap between ran and failed is
tried, as a failure costs more than one that runs. With unknown bytes the batch grows by a factor
until it fails.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

import msgspec

from .step_time import LEVEL, SAME_BATCH, WIDE

# of the predicted batch, left free: allocators round up, and a child starts again in 3 s
MARGIN = 0.003
# times what ran: as far as a batch may grow where nothing tells, and a curve is trusted
BLIND_GROWTH = 8
# of the predicted largest batch: safe without having run; and of the free memory, used where its
# line bends upwards
SAFE_SHARE = 0.8
# times the largest that ran: safe without having run, in bytes and in time; steps that differ by
# less don't show how their tuning grows
SAFE_GROWTH = 1.25
UNBOUNDED = 1 << 30  # samples


class Memory(msgspec.Struct, frozen=True, dict=True):
    """One device's evidence: `points` are (batch, bytes) in rising batch, `failed` the smallest
    batch that ran out.
    """

    limit_bytes: int | None
    points: tuple[tuple[int, int], ...] = ()
    ran: int = 0
    failed: int | None = None
    failures: int = 0  # times that it ran out

    @cached_property
    def apart(self) -> tuple[tuple[int, int], ...]:
        """The distinct points, chosen from the largest down; its outermost two if none are
        distinct.
        """
        kept: list[tuple[int, int]] = []
        for point in reversed(self.points):
            if not kept or point[0] <= (1 - LEVEL) * kept[-1][0]:
                kept.append(point)
        if len(kept) > 1:
            return tuple(reversed(kept))
        return self.points[:1] + self.points[1:][-1:]

    @property
    def line(self) -> tuple[float, float] | None:
        """(bytes at 0 samples, bytes a sample) through the two largest batches, not falling; None
        with fewer.
        """
        if len(self.apart) < 2:
            return None
        (b0, m0), (b1, m1) = self.apart[-2:]
        slope = max(0.0, (m1 - m0) / (b1 - b0))
        return m1 - slope * b1, slope

    def predict_largest(self) -> int | None:
        """The largest batch that fits by the line; None: unknown, or unbounded.

        If the slope grew by d, assume it grows by d again, and use only 80 % of what is free.
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
            bend = self._bend()
            part = SAFE_SHARE if bend else 1.0
            most = int(last + free / (slope + bend) * part)
        else:
            most = int(last + free / slope)
        return max(0, most - int(MARGIN * most))

    def _bend(self) -> float:
        """The bytes per sample by which the last slope is steeper than the one before; 0 if it
        isn't.
        """
        if len(self.apart) < 3:
            return 0.0
        (b0, m0), (b1, m1), (b2, m2) = self.apart[-3:]
        before, last = (m1 - m0) / (b1 - b0), (m2 - m1) / (b2 - b1)
        return last - before if last > before * (1 + LEVEL) else 0.0

    def largest_in_proportion(self) -> int | None:
        """The largest batch that fits if all bytes of the one batch that ran went by its rows, as
        it has some that don't; None if several ran, or one ran out.
        """
        if self.failed is not None or len(self.points) != 1 or self.limit_bytes is None:
            return None
        rows, used = self.points[0]
        return int(rows * self.limit_bytes / used) if used else None

    def largest_to_try(self, cap: int, quantum: int = 1, hoped: bool = False) -> int:
        """The largest batch worth trying, at most `cap`, a multiple of `quantum`; 0 if nothing can
        fit.

        With `hoped`, the largest that may fit after all, however many tries lie before it; two that
        failed are enough.
        """
        narrow = max(quantum, SAME_BATCH * self.ran)
        settled = self.failed is not None and self.failed - self.ran <= narrow
        if settled or cap <= self.ran:
            return min(self.ran, cap) // quantum * quantum
        guess = self.predict_largest()
        if guess is not None and (self.failed is None or guess < self.failed):
            return max(self.ran, min(guess, cap)) // quantum * quantum
        if self.failed is None:
            wanted = self.ran * BLIND_GROWTH
        elif hoped and self.failures < 2:
            wanted = self.failed - quantum
        else:
            wanted = self._middle(self.failed)
        return min(cap, max(quantum, wanted)) // quantum * quantum

    def largest_in_split(self, cap: int, quantum: int = 1, bold: bool = False) -> int:
        """The largest batch worth trying in a split: the next guess if bytes are known or `bold`,
        else what ran.
        """
        unknown = self.limit_bytes is None or self.line is None
        if (unknown and not bold) or self._line_is_refuted:
            return min(self.ran, cap) // quantum * quantum
        return self.largest_to_try(cap, quantum)

    @property
    def _line_is_refuted(self) -> bool:
        """True if it ran out of memory twice, and the line doesn't say so."""
        if self.failures < 2:
            return False
        guess = self.predict_largest()
        return guess is None or self.failed is None or guess >= self.failed

    def largest_safe(self, cap: int, quantum: int = 1) -> int:
        """The largest batch, at most `cap`, that safely fits: what ran, or a little more far below
        the limit.
        """
        safe = self.ran
        guess = self.predict_largest()
        if self.failed is None and guess is not None and self.ran:
            safe = max(safe, min(int(guess * SAFE_SHARE), int(self.ran * SAFE_GROWTH)))
        return min(safe, cap) // quantum * quantum

    def largest_within(self, limit_bytes: float) -> int:
        """The largest batch that takes at most `limit_bytes`, by lines from point to point, the
        origin first.
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
        if self.limit_bytes is None and self.ran and failed > WIDE * self.ran:
            return int((self.ran * failed) ** 0.5)
        return self.ran + (failed - self.ran) // 4


def read_memory(
    limit_bytes: int | None, points: Mapping[int, int], ran: Iterable[int], full: Collection[int]
) -> Memory:
    """The evidence by the bytes of batches, the batches that fit, and those that ran out, once for
    each time.
    """
    failed = min(full, default=None)
    largest = max((batch for batch in ran if failed is None or batch < failed), default=0)
    return Memory(limit_bytes, tuple(sorted(points.items())), largest, failed, len(full))
