"""The speed that a device may have between the batches that it was measured with: what another
batch could show.

Times rise, and between two points they lie on no line that must be believed: a knee, a stair or
another kernel may be there. In each gap time may go on as before it, for half of the gap: a step up
may be anywhere. Stairs are hoped to go on beyond what ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.shares.curves import Curve

from .evidence import CLEAR
from .memory import BLIND_GROWTH
from .step_time import LEVEL, Point, fit_stairs, make_rising, merge_points


def hopeful_curve(points: Sequence[Point], curve: Curve) -> Curve:
    """The fastest curve that the points allow; the fitted one where that explains them."""
    found = merge_points(points)
    if curve.simple and len(curve.batches) > 2 and (stairs := fit_stairs(tuple(points))):
        return stairs.curve(BLIND_GROWTH * found[-1].batch, curve.error)
    if len(found) < 3 or (curve.simple and not curve.flat and not bend_is_open(found, curve)):
        return curve
    knots = [
        (0.0, min(curve.seconds(0), found[0].seconds)),
        (float(found[0].batch), found[0].seconds),
    ]
    for i in range(1, len(found)):
        knots += [bend] if (bend := _bend(found, i)) else []
        knots.append((float(found[i].batch), found[i].seconds))
    times = make_rising([time for _, time in knots])
    return Curve(
        tuple(batch for batch, _ in knots),
        tuple(times),
        _slope_beyond(found, curve),
        False,
        curve.error,
    )


def _slope_beyond(points: Sequence[Point], curve: Curve) -> float:
    """Where each sample more took less and less time, that goes on as a power of the batch, over
    the next growth.
    """
    first, middle, end = points[-3:]
    before, last = _slope(first, middle), _slope(middle, end)
    if curve.simple or last >= before:
        return curve.slope
    one, two = (
        first.batch + middle.batch,
        middle.batch + end.batch,
    )  # the middles of the gaps, doubled
    growth = math.log(BLIND_GROWTH * end.batch / two) / math.log(two / one)
    return min(curve.slope, last * math.pow(last / before, growth))


def bend_is_open(points: Sequence[Point], curve: Curve) -> bool:
    """True if the bend may be anywhere between points: one alone lies beyond a level stretch, or
    three make it.
    """
    risen = sum(point.seconds > (1 + LEVEL) * curve.times[0] for point in points)
    return curve.bent and (len(points) == 3 or risen == 1)


def _bend(points: Sequence[Point], right: int) -> tuple[float, float] | None:
    """The most hopeful bend in the gap before a point: (batch, seconds); None where none is worth a
    measurement.
    """
    one, other = points[right - 1], points[right]
    own = _slope(one, other)
    after = _slope(other, points[right + 1]) if right + 1 < len(points) else 0.0
    before = (
        _slope(points[right - 2], one) if right > 1 else own if after < (1 + LEVEL) * own else 0.0
    )
    if own <= before or other.batch - one.batch < 2:
        return None
    batch = (one.batch + other.batch) // 2
    seconds = one.seconds + before * (batch - one.batch)
    gain = one.seconds + own * (batch - one.batch) - seconds
    clear = gain > CLEAR * math.hypot(one.error, other.error) * other.seconds
    return (float(batch), seconds) if clear and one.batch < batch < other.batch else None


def _slope(one: Point, other: Point) -> float:
    return max(0.0, (other.seconds - one.seconds) / (other.batch - one.batch))
