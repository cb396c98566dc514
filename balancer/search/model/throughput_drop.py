"""Where a device's samples/s may have a peak between two measured batches.

Samples a second mostly rise with the batch, but where a library switches kernels they may fall again, and a line
through few points hides that. So after a fall each gap between batches is judged by its middle, assuming that the slope
before the gap continues through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.balancer.search.model.step_time import Point, merge_points

FALL = 0.05  # relative: a smaller drop of samples/s is no fall
FALL_ERRORS = 3.0  # standard errors: a smaller drop is no fall either
DROP_GAIN = 0.03  # relative gain that is worth a probe
NARROW = 1.5  # factor: between batches that differ by less nothing is tried
FEWEST_POINTS = 3  # with fewer there is no slope before a gap


def throughput_falls(points: Sequence[Point]) -> bool:
    """Whether a larger batch made clearly fewer samples/s than a smaller one."""
    top = max(points, key=_rate, default=None)
    return top is not None and any(p.batch > top.batch and _rate(p) < _rate(top) * (1 - _doubt(p, top)) for p in points)


def guess_faster_batch(alone: Sequence[Point], quantum: int = 1) -> int:
    """The batch between two measured ones that may make more samples/s than any of them; 0 if none may."""
    points = merge_points(alone)
    if len(points) < FEWEST_POINTS:
        return 0
    rate, batch = max(_promises(points, quantum), default=(0.0, 0))
    return batch if rate > (1 + DROP_GAIN) * max(map(_rate, points)) else 0


def _promises(points: Sequence[Point], quantum: int) -> list[tuple[float, int]]:
    """(samples/s, batch) at the geometric middle of each gap that is wide enough."""
    promises = []
    for before, left, right in zip(points, points[1:], points[2:], strict=False):
        batch = round(math.sqrt(left.batch * right.batch)) // quantum * quantum
        if left.batch < batch < right.batch and right.batch >= NARROW * left.batch:
            slope = max(0.0, (left.seconds - before.seconds) / (left.batch - before.batch))
            promises.append((batch / (left.seconds + slope * (batch - left.batch)), batch))
    return promises


def _rate(point: Point) -> float:
    return point.batch / point.seconds


def _doubt(one: Point, other: Point) -> float:
    return max(FALL, FALL_ERRORS * math.hypot(one.error, other.error))
