"""Stairs in a device's step time: whether a few points show that it comes in multiples of one height, and of which.

Under stairs lies a straight line, rounded up. Each point holds the line to a band of one height, so the lines that
explain all points fill a small polygon of (fixed, slope): its middle is the best guess, its upper edge is sure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import msgspec

Seen = tuple[int, float, float]  # batch, seconds, relative error
Mark = tuple[int, float, float, float]  # batch, seconds, how far its step may be, weight
Straight = tuple[float, float]  # fixed, slope

MOST_STEPS = 40  # the largest time in step heights: finer stairs are no matter
FEWEST_POINTS = 4
WITHIN = 3.5  # errors that a point may be off its step
TIGHT = 0.3  # step heights that errors may reach for a time to tell its step
MOST_VAGUE = 3.0  # step heights
CHANCE = 0.02  # of smooth times to lie so near to multiples of some height; above it stairs are not believed
LOOSE = 0.5  # the same once smooth curves were refuted
LEAST_ERROR = 0.0005
REFINED = 3  # times that a height is fitted


class Stairs(msgspec.Struct, frozen=True):
    """A step height in seconds, and the corners of the lines under the stairs."""

    height: float
    corners: tuple[Straight, ...]

    @property
    def middle(self) -> Straight:
        """The best guess of the line."""
        count = len(self.corners)
        return sum(fixed for fixed, _ in self.corners) / count, sum(slope for _, slope in self.corners) / count

    def knots(self, doubt: float) -> tuple[list[tuple[float, float]], float]:
        """Rising (batch, seconds), and the last slope; `doubt` 0 is the middle, 1 the highest line, below 0 hope."""
        meets = {0.0}
        for (fixed0, slope0), (fixed1, slope1) in combinations(self.corners, 2):
            if slope0 != slope1 and (batch := (fixed0 - fixed1) / (slope1 - slope0)) > 0:
                meets.add(batch)
        fixed, rise = self.middle
        knots: list[tuple[float, float]] = []
        for batch in sorted(meets):
            highest = max(one + slope * batch for one, slope in self.corners)
            time = doubt * highest + (1 - doubt) * (fixed + rise * batch)
            knots.append((batch, max(time, knots[-1][1]) if knots else max(time, 0.0)))
        return knots, max(0.0, doubt * max(slope for _, slope in self.corners) + (1 - doubt) * rise)


def stairs(points: tuple[Seen, ...], convinced: bool) -> Stairs | None:
    """The highest stairs that explain the points; None if none do.

    `convinced`: smooth curves were refuted, so only the fit counts; else it must also be no matter of chance.
    """
    if len(points) < FEWEST_POINTS:
        return None
    marks = tuple(_marked(point) for point in points)
    top = max(seconds for _, seconds, _ in points)
    tried: set[float] = set()
    for steps in range(2, MOST_STEPS + 1):  # finer stairs fit anything
        height = _refined(marks, top / steps)
        if not height or height in tried:
            continue
        tried.add(height)
        others = 1 if convinced else max(1, round(top / height) - 1)  # heights above it that might have fitted
        if _chance(points, height) * others > (LOOSE if convinced else CHANCE):
            continue
        if corners := _under(marks, height):
            return Stairs(height, corners)
    return None


def _marked(seen: Seen) -> Mark:
    batch, seconds, error = seen
    off = max(error, LEAST_ERROR) * seconds
    return batch, seconds, WITHIN * off, 1 / off**2


def _counts(seconds: float, reach: float, height: float) -> tuple[int, int]:
    """The fewest and most whole heights that a time can be, give or take its reach; (1, 0) if it can't be any."""
    reach, steps = min(reach / height, MOST_VAGUE), seconds / height
    if reach < TIGHT:
        nearest = max(1, round(steps))
        return (nearest, nearest) if abs(steps - nearest) <= reach else (1, 0)
    return max(1, math.ceil(steps - reach)), max(1, math.floor(steps + reach))


def _refined(marks: Sequence[Mark], height: float) -> float:
    """The height nearby that fits best as whole multiples; 0 if none does."""
    for _ in range(REFINED):
        above = below = 0.0
        for _, seconds, reach, weight in marks:
            if count := _nearest(seconds, reach, height):
                above += weight * count * seconds
                below += weight * count * count
        if not below:
            return 0.0
        last, height = height, above / below
        if height == last:
            break
    counts = (_counts(seconds, reach, height) for _, seconds, reach, _ in marks)
    return height if all(low <= high for low, high in counts) else 0.0


def _nearest(seconds: float, reach: float, height: float) -> int:
    """The whole heights that a time tells, though the height be a little off; 0 if its error is too large."""
    if reach < TIGHT * height:
        return max(1, round(seconds / height))
    low, high = _counts(seconds, reach, height)
    return low if low == high else 0


def _chance(points: Sequence[Seen], height: float) -> float:
    """How likely a smooth curve's times would lie as near to multiples as their errors allow; equal ones count once."""
    levels: dict[int, float] = {}
    for _, seconds, error in points:
        steps = round(seconds / height)
        reach = min(1.0, 2 * WITHIN * max(error, LEAST_ERROR) * seconds / height)
        levels[steps] = min(reach, levels.get(steps, 1.0))
    return math.prod(sorted(levels.values())[1:])  # one level is spent on the height itself


def _under(marks: Sequence[Mark], height: float) -> tuple[Straight, ...]:
    """Corners of the polygon of rising lines that pass within one step below every point; none if it is empty."""
    counts = [(*_counts(seconds, reach, height), batch) for batch, seconds, reach, _ in marks]
    bands = [((low - 1) * height, high * height, batch) for low, high, batch in counts]
    slack = 1e-9 * height
    corners = []
    edges = [(b, t) for low, high, b in bands for t in (low, high)]
    for (b0, t0), (b1, t1) in combinations(edges, 2):
        if b0 == b1:
            continue
        slope = (t1 - t0) / (b1 - b0)
        fixed = t0 - slope * b0
        if slope >= 0 and all(low - slack <= fixed + slope * b <= high + slack for low, high, b in bands):
            corners.append((fixed, slope))
    return tuple(corners)
