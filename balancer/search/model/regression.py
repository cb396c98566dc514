"""The simplest line through a few noisy points: straight, or flat up to a knee and straight after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from evener.balancer.search.model.points import LEAST_ERROR, Point

STRAIGHT = 2.5  # a fit stands if no point is further off than so many of its errors (of 95 % of small fits none is)


class Line(msgspec.Struct, frozen=True):
    """seconds(b) = max(flat, fixed + slope * b)."""

    fixed: float
    slope: float
    flat: float = 0.0

    def seconds(self, batch: float) -> float:
        """Predicted step time."""
        return max(self.flat, self.fixed + self.slope * batch)

    @property
    def knee(self) -> float:
        """The batch up to which it is flat; 0 if it never is."""
        return max(0.0, (self.flat - self.fixed) / self.slope) if self.slope > 0 else 0.0


def simplest(points: Sequence[Point]) -> tuple[Line, float]:
    """The simplest of straight line and flat-then-straight that stands, and its worst residual in errors."""
    line = _straight(points)
    worst = _worst(points, line)
    if worst <= STRAIGHT or len(points) < 3:
        return line, worst
    hinge = _hinge(points)
    off = _worst(points, hinge)
    return (hinge, off) if off < worst else (line, worst)


def _straight(points: Sequence[Point]) -> Line:
    """Least squares of relative residuals, neither part negative; one point alone is taken to be all slope."""
    if len(points) == 1:
        return Line(0.0, points[0].seconds / points[0].batch)
    found = _rising(points)
    if found.fixed >= 0:
        return found
    w = _weights(points)
    square = math.fsum(a * p.batch**2 for a, p in zip(w, points, strict=True))
    return Line(0.0, math.fsum(a * p.batch * p.seconds for a, p in zip(w, points, strict=True)) / square)


def _hinge(points: Sequence[Point]) -> Line:
    """Flat through the first points and straight through the rest, wherever the cut fits best."""
    best, worst = _straight(points), math.inf
    for cut in range(1, len(points)):
        flat = _level(points[:cut])
        rest = points[cut:]
        if len(rest) == 1:  # one point on the slope: the knee is unknown, the longest flat stretch rises the steepest
            left = points[cut - 1]
            slope = max(0.0, (rest[0].seconds - flat) / (rest[0].batch - left.batch))
            line = Line(flat - slope * left.batch, slope, flat)
        else:
            base = _rising(rest)
            line = Line(base.fixed, base.slope, flat)
        off = _worst(points, line)
        if off < worst:
            best, worst = line, off
    return best


def _rising(points: Sequence[Point]) -> Line:
    """Least squares of relative residuals, whatever the sign of the fixed part: beyond a knee it may be negative."""
    w = _weights(points)
    total = math.fsum(w)
    mean_b = math.fsum(a * p.batch for a, p in zip(w, points, strict=True)) / total
    mean_t = math.fsum(a * p.seconds for a, p in zip(w, points, strict=True)) / total
    spread = math.fsum(a * (p.batch - mean_b) ** 2 for a, p in zip(w, points, strict=True))
    joint = math.fsum(a * (p.batch - mean_b) * (p.seconds - mean_t) for a, p in zip(w, points, strict=True))
    slope = max(0.0, joint / spread)
    return Line(mean_t - slope * mean_b, slope)


def _weights(points: Sequence[Point]) -> list[float]:
    return [1 / (max(p.error, LEAST_ERROR) * p.seconds) ** 2 for p in points]


def _level(points: Sequence[Point]) -> float:
    weights = [1 / max(p.error, LEAST_ERROR) ** 2 for p in points]
    return math.fsum(w * p.seconds for w, p in zip(weights, points, strict=True)) / math.fsum(weights)


def _worst(points: Sequence[Point], line: Line) -> float:
    return max(abs(line.seconds(p.batch) / p.seconds - 1) / max(p.error, LEAST_ERROR) for p in points)
