"""Estimate the lowest step times that a device's measurements don't rule out.

A lower bound on the step time is an upper bound on the throughput. A search uses it to decide which
batches are worth measuring.

Step times rise with the batch, but not necessarily on a line between two measured batches. The
curve may have a plateau and then rise, it may jump, or another kernel may be used. So in the first
half of the gap between two measured batches, the bound continues with the slope that it had before
the gap. It rises to the next measured time in the second half. A piecewise-constant curve is
assumed to continue beyond the largest measured batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.shares.curves import Curve

from .evidence import CLEAR
from .memory import BLIND_GROWTH
from .step_time import FLAT_TOLERANCE, Point, fit_piecewise_constant, make_rising, merge_points


def lower_bound_curve(points: Sequence[Point], curve: Curve) -> Curve:
    """Return a lower bound on the step time as a function of the batch.

    `curve` is the function that was fitted to the measured `points`. The bound equals the measured
    times. Between and beyond them, it is as low as is plausible. Batches at which it is far below
    `curve` are worth measuring.
    """
    found = merge_points(points)
    if curve.simple and len(curve.batches) > 2:
        piecewise = fit_piecewise_constant(tuple(points))
        if piecewise:
            return piecewise.curve(BLIND_GROWTH * found[-1].batch, curve.error)
    explained = curve.simple and not curve.flat and not plateau_end_is_unknown(found, curve)
    if len(found) == 2:
        return _flat_if_equal(found, curve)
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


def _flat_if_equal(points: Sequence[Point], curve: Curve) -> Curve:
    """Return a constant curve if the two points' times are equal within noise, else `curve`."""
    one, other = points
    error = math.hypot(one.error, other.error) * other.seconds
    if abs(other.seconds - one.seconds) > CLEAR * error:
        return curve
    total = one.weight + other.weight
    seconds = (one.weight * one.seconds + other.weight * other.seconds) / total
    batches = (0.0, float(other.batch))
    return Curve(batches, (seconds, seconds), 0.0, True, curve.error)


def _slope_beyond(points: Sequence[Point], curve: Curve) -> float:
    """Return the bound's slope beyond the largest measured batch, in seconds per row."""
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


def plateau_end_is_unknown(points: Sequence[Point], curve: Curve) -> bool:
    """Whether a curve has a plateau whose end is uncertain for lack of measurements."""
    risen = sum(point.seconds > (1 + FLAT_TOLERANCE) * curve.times[0] for point in points)
    return curve.bent and (len(points) == 3 or risen == 1)


def _find_bend(points: Sequence[Point], right: int) -> tuple[float, float] | None:
    """Return the batch and time at which the bound bends between two neighboring measurements.

    These are `points[right - 1]` and `points[right]`. None if the bound is a line between them.
    """
    one, other = points[right - 1], points[right]
    slope_across = _slope(one, other)
    continued = _continued_slope(points, right, slope_across)
    if slope_across <= continued or other.batch - one.batch < 2:
        return None
    batch = (one.batch + other.batch) // 2
    seconds = one.seconds + continued * (batch - one.batch)
    gain = one.seconds + slope_across * (batch - one.batch) - seconds
    error = math.hypot(one.error, other.error) * other.seconds
    if gain > CLEAR * error and one.batch < batch < other.batch:
        return float(batch), seconds
    return None


def _continued_slope(points: Sequence[Point], right: int, slope_across: float) -> float:
    """Return the slope with which the bound continues after the point `points[right - 1]`.

    It is in seconds per row, and is the slope of the line that ends at this point. No line ends at
    the first point. Its slope is 0 if the time rises clearly faster after `points[right]`, because
    the time may then be constant over most of the first gap; otherwise it is `slope_across`, the
    slope of the line from `points[right - 1]` to `points[right]`.
    """
    # the time may continue to rise as before `points[right - 1]`
    if right > 1:
        return _slope(points[right - 2], points[right - 1])
    after = _slope(points[right], points[right + 1]) if right + 1 < len(points) else 0.0
    # a plateau may reach over most of the first gap
    return slope_across if after < (1 + FLAT_TOLERANCE) * slope_across else 0.0


def _slope(one: Point, other: Point) -> float:
    return max(0.0, (other.seconds - one.seconds) / (other.batch - one.batch))
