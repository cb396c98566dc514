"""A device beside others: its solo points, made as slow as its own part of splits shows it to be."""

from __future__ import annotations

import math

from evener.balancer.search.model.points import LEAST_ERROR, Point
from evener.balancer.search.model.step_time import Curve
from evener.balancer.search.observations import Device

NEAR_BATCH = 0.15  # a solo point so near to a split's share shows contention, not shape
CONTENTION_ERRORS = 2.5  # standard errors before a split is said to slow a device


def slowed(device: Device, alone: Curve | None) -> tuple[Point, ...]:
    """The solo points, as slow as the device was beside others where that can be told from the curve's shape."""
    if alone is None or not device.beside:
        return device.alone
    batches = [p.batch for p in device.alone]
    told = ((_told_at(p, batches, alone), p) for p in device.beside)
    ratios = [(ratio, _doubt(p, alone)) for ratio, p in told if ratio is not None]
    total = math.fsum(1 / error**2 for _, error in ratios)
    if not ratios:
        return device.alone
    factor = math.fsum(ratio / error**2 for ratio, error in ratios) / total
    if abs(factor - 1) <= CONTENTION_ERRORS / math.sqrt(total):
        return device.alone
    return tuple(Point(p.batch, p.seconds * factor, p.error) for p in device.alone)


def _told_at(point: Point, batches: list[int], alone: Curve) -> float | None:
    """What a device's time beside others is to its time alone, where the solo points tell that; else None.

    They do if one lies near or a straight curve spans the batch. Of stairs the nearest in number that may be is
    believed if it fits; else the number must be sure, or a share just beyond an edge would be taken for contention.
    """
    if alone.stair:
        ratios = [point.seconds / (count * alone.stair) for count in alone.levels(point.batch)]
        nearest = min(ratios, key=lambda ratio: abs(ratio - 1))
        fits = abs(nearest - 1) <= CONTENTION_ERRORS * _doubt(point, alone)
        return nearest if fits or len(ratios) == 1 else None
    spans = alone.straight and not alone.bent and min(batches) <= point.batch <= max(batches)
    if spans or any(abs(point.batch - known) <= NEAR_BATCH * known for known in batches):
        return point.seconds / alone.seconds(point.batch)
    return None


def _doubt(point: Point, curve: Curve) -> float:
    return math.hypot(max(point.error, LEAST_ERROR), max(curve.error, LEAST_ERROR))
