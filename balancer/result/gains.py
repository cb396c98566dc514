"""What one layout gains over another, by the two rates as they are printed, and where nothing can be said of it."""

from __future__ import annotations

from evener.balancer.result.number_format import percent, rate, relative_error
from evener.balancer.types import Interval

UNKNOWN = 0.25  # relative error, beyond which samples/s aren't known
COARSE = 0.02  # the same, beyond which a gain has whole percents
NEAR = 2  # times a split's global batch: the most that a plan may have to be compared with it


def is_certain(*figures: Interval) -> bool:
    """Whether samples/s are certain enough to be said."""
    return all(relative_error(one.value, one.low, one.high) <= UNKNOWN for one in figures)


def is_near(batch: int, plan_batch: int, split: bool) -> bool:
    """Whether a layout of so many samples can be compared with the plan: a single device has its own best batch."""
    return not split or NEAR * batch >= plan_batch


def printed_gain(own: float, other: float) -> float:
    """The gain of two rates as they are printed."""
    first, second = (float(rate(one).replace(" ", "")) or one for one in (own, other))
    return first / second - 1


def write_gain(gain: float, *figures: Interval) -> str:
    """In percent, whole ones where a figure is rough: 36.4 %, 36 %."""
    rough = any(relative_error(one.value, one.low, one.high) > COARSE for one in figures)
    return percent(gain, 0 if rough and gain >= 0.005 else 1)
