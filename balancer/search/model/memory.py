"""How many samples fit: a device's line of bytes(batch), the bracket of what ran and what didn't, and the next guess.

The guess is where the line through the two largest batches measured that lie apart meets the device's memory. A guess
that failed refutes the line; from then on the bracket is halved. Without known bytes the batch grows by a factor, then
halves. What a step with others holds beside its samples is learnt from the first such step.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import msgspec

MARGIN = 0.003  # of the predicted batch, left out: allocators round up with the size of what they hold
GROWTH = 8  # from one batch to the next where memory is unknown, or its line unsure
FINE = 0.03  # a bracket narrower than this, relatively, is settled
WIDE = 4  # a wider bracket without known bytes is cut at its geometric mean
PATIENCE = 3  # times out of memory after which only what ran is tried
SAFE_SHARE = 0.8  # of the predicted largest batch: safe without having run,
SAFE_GROWTH = 1.25  # if it is not more than so many times what ran
TELLING = 0.02  # of the bytes: a rise over twice the batch that is smaller leaves the line unsure
STRAIGHT = 0.01  # slopes that differ by less, relatively, are alike
BELIEVED = 0.7  # of the way that a bend leaves
UNBOUNDED = 1 << 30  # samples
APART = 0.95  # of a batch; a slope through two that lie nearer is what allocators round, not what samples take


class Memory(msgspec.Struct, frozen=True, dict=True):
    """One device's evidence: `points` are (batch, bytes) in rising batch, `failed` the smallest batch that ran out.

    `in_splits` are points of steps that it made with others, where buffers for what is exchanged are held too.
    """

    limit_bytes: int | None
    points: tuple[tuple[int, int], ...] = ()
    ran: int = 0
    failed: int | None = None
    failures: int = 0  # times that it ran out
    in_splits: tuple[tuple[int, int], ...] = ()

    @cached_property
    def exchanged_bytes(self) -> int:
        """The most that a step with others held above what the samples take alone; 0 where that is unknown.

        Only up to the largest batch that ran alone: further on, a bend of the line would be taken for it.
        """
        if len(self.points) < 2:
            return 0
        above = (used - self.bytes_at(batch) for batch, used in self.in_splits if batch <= self.points[-1][0])
        return max(0, round(max(above, default=0)))

    @cached_property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """The points, and what steps with others say of the samples alone; in rising batch."""
        shape = dict(self.points)
        for batch, used in self.in_splits:
            shape[batch] = max(shape.get(batch, 0), used - self.exchanged_bytes)
        return tuple(sorted(shape.items()))

    @cached_property
    def apart(self) -> tuple[tuple[int, int], ...]:
        """The shape's points that lie apart, from the largest down, in rising batch; the outermost two if none do."""
        kept: list[tuple[int, int]] = []
        for point in reversed(self.shape):
            if not kept or point[0] <= APART * kept[-1][0]:
                kept.append(point)
        return tuple(reversed(kept)) if len(kept) > 1 else self.shape[:1] + self.shape[1:][-1:]

    @property
    def line(self) -> tuple[float, float] | None:
        """(bytes at 0 samples, bytes a sample) through the two largest batches; None with fewer, or if it falls."""
        if len(self.apart) < 2:
            return None
        (b0, m0), (b1, m1) = self.apart[-2:]
        slope = max(0.0, (m1 - m0) / (b1 - b0))
        return m1 - slope * b1, slope

    @property
    def unsure(self) -> bool:
        """Whether the line is nearly flat over twice the batch: the optimizer's own peak may hide what samples take."""
        return len(self.apart) > 1 and _flat(*self.apart[-2:])

    @property
    def was_unsure(self) -> bool:
        """Whether it was so before the last point, which was therefore not taken as far as the line allowed."""
        return len(self.apart) > 2 and _flat(*self.apart[-3:-1])

    def predict_largest(self) -> int | None:
        """The largest batch that the line gives room for; None: unknown, or without bound.

        Where the points bend upwards, the last slope is the least that the next may be: the bend goes on as steeply,
        and only part of that way is believed.
        """
        line = self.line
        if line is None or self.limit_bytes is None or line[1] <= 0:
            return None
        bend = self._bend()
        last, used = self.shape[-1]
        free = self.limit_bytes - used
        way = free / (line[1] + bend) if free > 0 else free / line[1]
        most = int(last + way * (BELIEVED if bend and free > 0 else 1.0))
        return max(0, most - int(MARGIN * most))

    def _bend(self) -> float:
        """How much steeper, in bytes a sample, the last stretch is than the one before; 0 where they are alike."""
        if len(self.apart) < 3:
            return 0.0
        (b0, m0), (b1, m1), (b2, m2) = self.apart[-3:]
        before, last = (m1 - m0) / (b1 - b0), (m2 - m1) / (b2 - b1)
        return last - before if last > before * (1 + STRAIGHT) else 0.0

    def largest_to_try(self, cap: int, quantum: int = 1) -> int:
        """The largest batch worth trying, at most `cap`, a multiple of `quantum`; 0 if nothing can fit."""
        above = cap if self.failed is None else min(cap, (self.failed - 1) // quantum * quantum)
        if self.unsure:
            above = min(above, max(quantum, self.ran * GROWTH // quantum * quantum))
        if above <= self.ran or (self.failed is not None and self.failed - self.ran <= max(quantum, FINE * self.ran)):
            return min(self.ran, cap) // quantum * quantum
        guess = self.predict_largest()
        if guess is not None and (self.failed is None or guess < self.failed):
            return max(self.ran, min(guess, above)) // quantum * quantum
        if self.failed is not None:
            return min(above, max(quantum, self._middle(self.failed) // quantum * quantum))
        return min(above, max(quantum, self.ran * GROWTH)) // quantum * quantum

    def largest_in_split(self, cap: int, quantum: int = 1, bold: bool = False) -> int:
        """The largest batch worth trying beside others: the next guess if bytes are known or `bold`, else what ran."""
        unknown = self.limit_bytes is None or self.line is None
        if self.failures >= PATIENCE or (unknown and not bold):
            return min(self.ran, cap) // quantum * quantum
        return self._in_split().largest_to_try(cap, quantum)

    def largest_safe(self, cap: int, quantum: int = 1) -> int:
        """The largest batch, at most `cap`, that surely fits: what ran, and a little more far below the limit."""
        known = self.ran
        guess = self._in_split().predict_largest()
        if self.failed is None and guess is not None and self.ran:
            known = max(known, min(int(guess * SAFE_SHARE), int(self.ran * SAFE_GROWTH)))
        return min(known, cap) // quantum * quantum

    def bytes_at(self, batch: int) -> float:
        """Bytes at `batch` by straight lines through the points; through none with one point. Needs a point."""
        points = self.points if len(self.points) > 1 else ((0, 0), *self.points)
        right = min(max(1, bisect_left(points, (batch, 0))), len(points) - 1)
        (b0, m0), (b1, m1) = points[right - 1 : right + 1]
        return m0 + (m1 - m0) / (b1 - b0) * (batch - b0)

    def largest_within(self, limit_bytes: float) -> int:
        """The largest batch that holds at most so many bytes, by the same lines as `bytes_at`. Needs a point."""
        points = self.points if len(self.points) > 1 else ((0, 0), *self.points)
        right = min(max(1, bisect_left([used for _, used in points], limit_bytes)), len(points) - 1)
        (b0, m0), (b1, m1) = points[right - 1 : right + 1]
        slope = (m1 - m0) / (b1 - b0)
        if slope <= 0:
            return UNBOUNDED if limit_bytes >= m1 else 0
        return max(0, int(b1 + (limit_bytes - m1) / slope))

    def _in_split(self) -> Memory:
        """The same for steps with others, which leave less room; what ran alone may not fit there."""
        if self.limit_bytes is None or not self.exchanged_bytes:
            return self
        less = max(1, self.limit_bytes - self.exchanged_bytes)
        inside = msgspec.structs.replace(self, limit_bytes=less, points=self.shape, in_splits=())
        fits = max(inside.predict_largest() or 0, *(batch for batch, _ in self.in_splits))
        return msgspec.structs.replace(inside, ran=min(self.ran, fits))

    def _middle(self, failed: int) -> int:
        if self.limit_bytes is None and self.ran and failed > WIDE * self.ran:
            return int((self.ran * failed) ** 0.5)
        return (self.ran + failed) // 2


def _flat(point: tuple[int, int], larger: tuple[int, int]) -> bool:
    (b0, m0), (b1, m1) = point, larger
    return b1 >= 2 * b0 and m1 - m0 < TELLING * m1
