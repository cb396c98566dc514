"""A device's seconds(batch) as stairs: time is level, rises at once, and does so again after as many samples more.

Kernels compute whole waves of tiles, and what waits for a timer takes whole ticks of it. The equal rises are read from
the times alone; the batches then say where the stairs end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import msgspec

from evener.shares.curves import Curve

from .regression import rising_line

FEWEST = 4  # points: one more than a level stretch and a line beyond it have
LEAN = 0.04  # of a rise: a stair may lean by as much (stairs64, stairs128)
LEAST_RISE = 4.0  # times what a point may be off: a smaller one could explain anything (noise of stall)
WIDEST = 4096  # samples: the largest power of two that is tried as the width of a stair
MOST_STAIRS = 200  # in a curve


class Step(msgspec.Struct, frozen=True):
    """A measured time of a batch, and by how much it may be off, in seconds."""

    batch: int
    seconds: float
    error: float


class Stairs(msgspec.Struct, frozen=True):
    """seconds(b) = first + rise * ceil(b / width + shift), but at least `least`."""

    first: float
    rise: float
    width: float
    shift: float
    least: float

    def curve(self, largest: int, error: float) -> Curve:
        """The stairs up to a batch, as a curve with a knot at both ends of each."""
        knots: dict[float, float] = {}
        batch, level = 0, math.ceil(1 / self.width + self.shift)
        for stair in range(level, level + MOST_STAIRS):
            seconds, end = (
                max(self.least, self.first + self.rise * stair),
                math.floor((stair - self.shift) * self.width),
            )
            if end > batch:
                knots[batch + 1.0 if knots else 0.0] = knots[float(end)] = seconds
                batch = end
            if batch >= largest:
                break
        return Curve(tuple(knots), tuple(knots.values()), self.rise / self.width, error=error)


def fit_stairs(points: Sequence[Step]) -> Stairs | None:
    """The highest stairs that explain points in rising batch; None if none do, or the points are too few to tell."""
    if len(points) < FEWEST:
        return None
    low, high = points[0].seconds, points[-1].seconds
    error = max(point.error for point in points)
    for count in range(1, 2 * len(points)):
        rise = (high - low) / count
        if rise < LEAST_RISE * error:
            break
        levels = [round((point.seconds - low) / rise) for point in points]
        if len(set(levels)) < len(levels) and (found := _explain(points, levels)):
            return found
    return None


def _explain(points: Sequence[Step], levels: Sequence[int]) -> Stairs | None:
    """The stairs with these points on these levels; None if that contradicts their times or their batches."""
    samples = [(float(n), p.seconds, 1 / p.error**2) for n, p in zip(levels, points, strict=True)]
    first, rise = rising_line(samples, intercept_not_negative=False)
    for level, point in zip(levels, points, strict=True):
        if abs(first + rise * level - point.seconds) > point.error + LEAN * min(rise, point.seconds):
            return None
    placed = _place([point.batch for point in points], levels)
    return Stairs(first, rise, *placed, points[0].seconds) if placed else None


def _place(batches: Sequence[int], levels: Sequence[int]) -> tuple[float, float] | None:
    """(width, shift) of stairs that have these batches on these levels; None if there are none.

    As tiles are powers of two, such stairs from 0 on come first; then those in the middle of what the points allow.
    """
    low, high = 0.0, math.inf  # of 1 / width
    for (b0, n0), (b1, n1) in combinations(zip(batches, levels, strict=True), 2):
        low, high = max(low, (n1 - n0 - 1) / (b1 - b0)), min(high, (n1 - n0 + 1) / (b1 - b0))
    if low >= high:
        return None
    width = WIDEST
    while width > 1:
        if low <= 1 / width <= high:
            least, most = _shifts(batches, levels, 1 / width)
            if least < math.floor(most):
                return float(width), float(math.floor(most))
        width //= 2
    each = (low + high) / 2
    return 1 / each, sum(_shifts(batches, levels, each)) / 2


def _shifts(batches: Sequence[int], levels: Sequence[int], each: float) -> tuple[float, float]:
    """The shifts at which stairs with this many levels a sample put these batches on these levels."""
    most = min(n - each * b for b, n in zip(batches, levels, strict=True))
    return max(n - 1 - each * b for b, n in zip(batches, levels, strict=True)), most
