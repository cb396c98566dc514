"""Estimate the lowest step times that a device's measurements don't rule out.

A search uses this lower bound to decide which batches are worth measuring.

Step times rise with the batch, but not necessarily on a line between two measured batches: the
curve may be flat and then bend, it may jump, or another kernel may be used. So in the first half of
each gap between batches, the bound continues with the slope before the gap, and it rises to the
next measured time only in the second half. A step-shaped curve is assumed to continue beyond the
batches that ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.shares.curves import Curve

from .evidence import CLEAR
from .memory import BLIND_GROWTH
from .step_time import LEVEL, Point, fit_stairs, make_rising, merge_points


def optimistic_curve(points: Sequence[Point], curve: Curve) -> Curve:
    """Return a lower bound on the step time by batch, given measured step times.

    The bound equals the measured times, and is as low between and beyond them as is plausible.
    Batches at which it is far below `curve`, the likely step times, are worth measuring.
    """
    found = merge_points(points)
    if curve.simple and len(curve.batches) > 2:
        stairs = fit_stairs(tuple(points))
        if stairs:
            return stairs.curve(BLIND_GROWTH * found[-1].batch, curve.error)
    explained = curve.simple and not curve.flat and not bend_is_open(found, curve)
    if len(found) == 2:
        return _least_rise(found, curve)
    if len(found) < 3 or explained:
        return curve
    first = found[0]
    knots = [(0.0, min(curve.seconds(0), first.seconds)), (float(first.batch), first.seconds)]
    for i in range(1, len(found)):
        bend = _find_bend(found, i)
        if bend:
            knots.append(bend)
        knots.append((float(found[i].batch), found[i].seconds))
    batches = tuple(batch for batch, _ in knots)
    times = tuple(make_rising([time for _, time in knots]))
    return Curve(batches, times, _slope_beyond(found, curve), False, curve.error)


def _least_rise(points: Sequence[Point], curve: Curve) -> Curve:
    """Return a flat curve if two step times are equal within noise, otherwise `curve`."""
    one, other = points
    error = math.hypot(one.error, other.error) * other.seconds
    if abs(other.seconds - one.seconds) > CLEAR * error:
        return curve
    total = one.weight + other.weight
    seconds = (one.weight * one.seconds + other.weight * other.seconds) / total
    batches = (0.0, float(other.batch))
    return Curve(batches, (seconds, seconds), 0.0, True, curve.error)


def _slope_beyond(points: Sequence[Point], curve: Curve) -> float:
    """Return the lowest plausible seconds per row beyond the largest measured batch."""
    first, middle, end = points[-3:]
    before = _slope(first, middle)
    last = _slope(middle, end)
    if curve.simple or last >= before:
        return curve.slope
    # the middles of the two gaps, doubled
    one = first.batch + middle.batch
    two = middle.batch + end.batch
    # the slope falls further, as a power of the batch; taken at about the middle of the next gap
    growth = math.log(BLIND_GROWTH * end.batch / two) / math.log(two / one)
    return min(curve.slope, last * math.pow(last / before, growth))


def bend_is_open(points: Sequence[Point], curve: Curve) -> bool:
    """Whether it is still unclear at which batch a flat curve starts to rise."""
    risen = sum(point.seconds > (1 + LEVEL) * curve.times[0] for point in points)
    return curve.bent and (len(points) == 3 or risen == 1)


def _find_bend(points: Sequence[Point], right: int) -> tuple[float, float] | None:
    """Return the batch and time at which the bound bends between two measured batches.

    The gap is the one before `points[right]`. None if the bound has no bend there.
    """
    one, other = points[right - 1], points[right]
    own = _slope(one, other)
    before = _slope_before(points, right, own)
    if own <= before or other.batch - one.batch < 2:
        return None
    batch = (one.batch + other.batch) // 2
    seconds = one.seconds + before * (batch - one.batch)
    gain = one.seconds + own * (batch - one.batch) - seconds
    error = math.hypot(one.error, other.error) * other.seconds
    if gain > CLEAR * error and one.batch < batch < other.batch:
        return float(batch), seconds
    return None


def _slope_before(points: Sequence[Point], right: int, own: float) -> float:
    """Return the slope, in seconds per row, with which the bound enters a gap.

    The gap is the one before `points[right]`. `own` is the slope across it.
    """
    # the time may continue as in the gap before
    # `own`: the slope across that gap
    if right > 1:
        return _slope(points[right - 2], points[right - 1])
    after = _slope(points[right], points[right + 1]) if right + 1 < len(points) else 0.0
    # time may have been level in most of the first gap
    return own if after < (1 + LEVEL) * own else 0.0


def _slope(one: Point, other: Point) -> float:
    return max(0.0, (other.seconds - one.seconds) / (other.batch - one.batch))
