"""What one layout gains over another: by the two rates as they are printed, or else as measured in turn."""

from __future__ import annotations

import msgspec

from evener.balancer.result.number_format import percent, rate, relative_error
from evener.balancer.search.ranking import overlap
from evener.balancer.types import Interval

UNKNOWN = 0.25  # relative error, beyond which samples/s aren't known
COARSE = 0.02  # the same, beyond which a gain has whole percents
NEAR = 2  # times a split's global batch: the most that a plan may have to be compared with it


class Gain(msgspec.Struct, frozen=True):
    """A layout's samples/s over another's, less 1; None where nothing can be said.

    `paired`: as measured in turn, where the rates themselves say too little or something else.
    """

    value: float | None
    tie: bool = False
    paired: bool = False


def is_known(figure: Interval) -> bool:
    """Whether samples/s are certain enough to be said."""
    return relative_error(figure.value, figure.low, figure.high) <= UNKNOWN


def compare_rates(own: Interval, other: Interval) -> Gain:
    """The gain that follows from two rates; overlapping intervals are a tie."""
    if not other.value or not is_known(own) or not is_known(other):
        return Gain(None)
    return Gain(own.value / other.value - 1, overlap(own, other))


def compare_in_turn(own: Interval, other: Interval, gain: Interval, tie: bool) -> Gain:
    """The same of layouts measured in turn, with the `gain` that this showed."""
    found = compare_rates(own, other)
    if found.value is None or tie or gain.low <= 0 <= gain.high:
        return msgspec.structs.replace(found, tie=found.value is not None)
    if found.tie or not gain.low <= found.value <= gain.high:
        return Gain(gain.value, paired=True)
    return found


def is_near(batch: int, plan_batch: int, split: bool) -> bool:
    """Whether a layout of so many samples can be compared with the plan: a single device has its own best batch."""
    return not split or NEAR * batch >= plan_batch


def printed_gain(own: float, other: float) -> float:
    """The gain of two rates as they are printed."""
    return _printed(own) / _printed(other) - 1


def _printed(samples_per_second: float) -> float:
    return float(rate(samples_per_second).replace(" ", "")) or samples_per_second


def write_gain(gain: float, *figures: Interval) -> str:
    """In percent, whole ones where a figure is rough: 36.4 %, 36 %."""
    rough = any(relative_error(one.value, one.low, one.high) > COARSE for one in figures)
    return percent(gain, 0 if rough and abs(gain) >= 0.005 else 1)
