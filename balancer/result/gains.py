"""The gain of one layout over another, by the two rates as they are printed, and where nothing can be said of it."""

from __future__ import annotations

from collections.abc import Sequence

from ..number_format import percent, rate, relative_error
from ..types import Interval

UNKNOWN = 0.25  # relative error, beyond which samples/s aren't known
COARSE = 0.02  # the same, beyond which a gain has whole percents
SURELY = 0.01  # relative, beyond both intervals: faster in a split than alone
NEAR = 2  # times a split's global batch: the most that a plan may have to be compared with it


def is_certain(*figures: Interval) -> bool:
    """True if samples/s are certain enough to be said."""
    return all(relative_error(one.value, one.low, one.high) <= UNKNOWN for one in figures)


def is_comparable(own: Interval, own_shares: Sequence[int], other: Interval, shares: Sequence[int]) -> bool:
    """True if a gain over a layout says something; no `shares` stand for the sum of all devices alone.

    Not if a rate isn't certain, if a split has less than half of the samples, or if a device is faster in the split
    than it was alone: it wasn't measured at its best batch then.
    """
    active = [i for i, share in enumerate(shares) if share]
    if not other.value or not is_certain(own, other):
        return False
    if len(active) > 1:
        return NEAR * sum(shares) >= sum(own_shares)
    alike = own_shares.count(0) < len(own_shares) - 1 and len(shares) in (0, len(own_shares))
    part = sum(own_shares[i] for i in active) / sum(own_shares) if active else 1.0
    return not alike or part * own.low <= other.high * (1 + SURELY)


def printed_gain(own: float, other: float) -> float:
    """The gain of two rates as they are printed."""
    first, second = (float(rate(one).replace(" ", "")) or one for one in (own, other))
    return first / second - 1


def is_rough(*figures: Interval) -> bool:
    """True if a gain of one figure over another is known in whole percents alone."""
    return any(relative_error(one.value, one.low, one.high) > COARSE for one in figures)


def write_gain(gain: float, *figures: Interval) -> str:
    """The gain in percent, whole ones where a figure is rough: 36.4 %, 36 %."""
    return percent(gain, 0 if is_rough(*figures) and gain >= 0.005 else 1)
