"""A device's points in a split: solo times multiplied by the slowdown seen in splits."""

from __future__ import annotations

import math

from evener.balancer.search.model.evidence import DeviceEvidence
from evener.balancer.search.model.step_time import LEAST_ERROR, Point
from evener.shares.curves import Curve

NEAR_BATCH = 0.15  # relative: a solo point this near to a split's share shows contention, not the curve's shape
CONTENTION_ERRORS = 2.5  # standard errors: a smaller slowdown is noise


def slow_by_contention(device: DeviceEvidence, alone: Curve | None) -> tuple[Point, ...]:
    """The solo points, multiplied by the slowdown in splits where that can't be the curve's own shape."""
    if alone is None or not device.in_splits:
        return device.alone
    batches = [p.batch for p in device.alone]
    ratios = [
        (p.seconds / alone.seconds(p.batch), math.hypot(max(p.error, LEAST_ERROR), max(alone.error, LEAST_ERROR)))
        for p in device.in_splits
        if _comparable(p, batches, alone)
    ]
    if not ratios:
        return device.alone
    total = math.fsum(1 / error**2 for _, error in ratios)
    factor = math.fsum(ratio / error**2 for ratio, error in ratios) / total
    if abs(factor - 1) <= CONTENTION_ERRORS / math.sqrt(total):
        return device.alone
    return tuple(Point(p.batch, p.seconds * factor, p.error) for p in device.alone)


def _comparable(point: Point, batches: list[int], alone: Curve) -> bool:
    """Whether the solo time at this batch is certain: one was measured near it, or a straight line spans it."""
    spans = alone.simple and not alone.bent and min(batches) <= point.batch <= max(batches)
    return spans or any(abs(point.batch - batch) <= NEAR_BATCH * batch for batch in batches)
