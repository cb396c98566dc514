"""Where a device's samples/s may have a peak between two measured batches.

Samples a second mostly rise with the batch, but a library that takes other kernels for large ones makes them fall
again, and a line through few points hides that. So a fall is looked into: each gap is judged by its middle, with time
hoped to rise on as it rose up to the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.balancer.search.model.step_time import Point, merge_points

FALL = 0.05  # relative: samples/s that are lower by less have not fallen,
FALL_ERRORS = 3.0  # nor by less than so many standard errors
WORTH = 0.03  # relative gain that is worth a probe
NARROW = 1.5  # batches that differ by less, as a factor, have nothing between them
FEWEST = 3  # points; with fewer there is no rise to go on with


def throughput_falls(points: Sequence[Point]) -> bool:
    """Whether a larger batch made clearly fewer samples/s than a smaller one."""
    top = max(points, key=_rate, default=None)
    return top is not None and any(p.batch > top.batch and _rate(p) < _rate(top) * (1 - _doubt(p, top)) for p in points)


def guess_faster_batch(alone: Sequence[Point], quantum: int = 1) -> int:
    """The batch between two measured ones that may make more samples/s than any of them; 0 if none may."""
    points = merge_points(alone)
    if len(points) < FEWEST:
        return 0
    rate, batch = max(_promises(points, quantum), default=(0.0, 0))
    return batch if rate > (1 + WORTH) * max(map(_rate, points)) else 0


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
