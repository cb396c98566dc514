"""A device's seconds(batch): fitted to a few noisy points, monotone, and inverted exactly.

A curve is a rising broken line, rounded up to stairs where the points show a step height. The line is the simplest
that the points allow: straight (fixed cost + cost a sample), or flat up to a knee and straight after it, or one of
these bent through the points, each bend as strong as its evidence exceeds the noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import msgspec

from balancer.core.stairs import Seen, Stairs, stairs

SAME_BATCH = 0.02  # points nearer than this, relatively, are one point
LEAST_ERROR = 0.0005  # relative; no timing is believed to be better
STRAIGHT = 2.5  # a fit stands if no point is further off than so many of its errors (of 95 % of small fits none is)
MOST_KEPT = 8192  # fits of one search: of 1024 devices in a few kinds of doubt
ROUNDING = 1e-9  # relative slack where a time is compared with its own inverse


class Point(msgspec.Struct, frozen=True):
    """One measured time; `error` is its relative standard error."""

    batch: int
    seconds: float
    error: float


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


class Curve(msgspec.Struct, frozen=True):
    """seconds(batch) as a rising broken line through knots, straight beyond the last; `stair` rounds it up."""

    batches: tuple[float, ...]  # increasing, the first at or below every batch asked for
    times: tuple[float, ...]  # seconds, not decreasing
    slope: float  # seconds a sample beyond the last knot
    stair: float = 0.0  # step height in seconds; 0: smooth
    straight: bool = True  # the points lie on a simple shape within their errors
    error: float = 0.0  # relative standard error of a typical point

    def seconds(self, batch: float) -> float:
        """Predicted step time of `batch` samples."""
        time = self._smooth(batch)
        return max(1, math.ceil(time / self.stair - 1e-6)) * self.stair if self.stair else time

    def largest(self, seconds: float, ceiling: int, quantum: int = 1) -> int:
        """The most samples, a multiple of `quantum` up to `ceiling`, that take no longer than `seconds`; 0: none."""
        if math.isinf(seconds):
            return ceiling // quantum * quantum
        seconds *= 1 + ROUNDING
        if self.stair:
            seconds = math.floor(seconds / self.stair + 1e-6) * self.stair * (1 + ROUNDING)
            if seconds < self.stair:
                return 0
        times = self.times
        i = bisect_right(times, seconds)
        if i == 0:
            return 0
        if i == len(times):
            batch = self.batches[-1] + (seconds - times[-1]) / self.slope if self.slope > 0 else math.inf
        else:
            low, high = times[i - 1], times[i]
            batch = self.batches[i - 1] + (self.batches[i] - self.batches[i - 1]) * (seconds - low) / (high - low)
        return int(min(batch, ceiling)) // quantum * quantum

    def turns(self, ceiling: int, most: int = 40) -> list[float]:
        """The finish times at which throughput may be best: of its knots or stairs, and of `ceiling`."""
        last = self.seconds(ceiling)
        if self.stair:
            first = self.seconds(self.batches[0])
            count = round((last - first) / self.stair) + 1
            skip = max(1, count // most)
            return [last - n * skip * self.stair for n in range(min(count, most)) if last - n * skip * self.stair > 0]
        return [time for batch, time in zip(self.batches, self.times, strict=True) if batch < ceiling] + [last]

    @property
    def bent(self) -> bool:
        """Whether it has a knee, a bend or stairs."""
        return self.stair > 0 or len(self.batches) > 2 or self.times[0] == self.times[-1]

    def _smooth(self, batch: float) -> float:
        batches, times = self.batches, self.times
        i = bisect_right(batches, batch)
        if i == len(batches):
            return times[-1] + self.slope * (batch - batches[-1])
        if i == 0:
            return times[0]  # never below the first knot, which is 0
        left = batches[i - 1]
        return times[i - 1] + (times[i] - times[i - 1]) * (batch - left) / (batches[i] - left)


FindStairs = Callable[[tuple[Seen, ...], bool], Stairs | None]
Fit = Callable[[tuple[Point, ...], float, bool], Curve | None]


def fit(points: Iterable[Point], doubt: float = 0.0, stepped: bool = False, find: FindStairs = stairs) -> Curve | None:
    """The curve that explains the points; None without any.

    `doubt`: where stairs or bends leave doubt, 0 takes the middle and 1 the slowest that may be. `stepped`: devices
    like this one show stairs, so they need less evidence here. `find` finds these.
    """
    single = merged(points, 0.0)
    if not single:
        return None
    known = merged(single, SAME_BATCH)
    shape, worst = simplest(known)
    smooth = worst <= STRAIGHT
    if smooth and shape.flat == 0:
        return _broken(shape, known, [], True)
    if found := find(tuple((p.batch, p.seconds, p.error) for p in single), stepped or not smooth):
        return _stepped(found, known, doubt)
    curve = _broken(shape, known, [] if smooth else _bends(known, shape), smooth)
    return _late(curve) if doubt >= 1 and not smooth else curve


def remembered() -> Fit:
    """`fit` for the length of one search: what was fitted once is not fitted again, and goes when the search does."""
    find = lru_cache(MOST_KEPT)(stairs)  # hope, middle and doubt ask for the same
    return lru_cache(MOST_KEPT)(partial(fit, find=find))


def _late(curve: Curve) -> Curve:
    """The slowest rising curve through the knots: just beyond each, as slow as the next."""
    batches, times = list(curve.batches), list(curve.times)
    beyond = [batch + 0.5 for batch in batches[:-1]]
    knots = sorted([*zip(batches, times, strict=True), *zip(beyond, times[1:], strict=True)])
    return msgspec.structs.replace(curve, batches=tuple(b for b, _ in knots), times=tuple(t for _, t in knots))


def _stepped(found: Stairs, points: Sequence[Point], doubt: float) -> Curve:
    knots, slope = found.knots(doubt)
    knots.append((knots[-1][0] + 1.0, knots[-1][1] + slope))
    batches, times = zip(*knots, strict=True)
    return Curve(batches, times, slope, found.height, False, _typical(points))


def merged(points: Iterable[Point], within: float) -> list[Point]:
    """Points in rising batch; those whose batches are nearer than `within`, relatively, averaged by their errors."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: (p.batch, p.seconds, p.error)):
        if groups and point.batch <= groups[-1][0].batch * (1 + within):
            groups[-1].append(point)
        else:
            groups.append([point])
    return [_average(group) for group in groups]


def simplest(points: Sequence[Point]) -> tuple[Line, float]:
    """The simplest of straight line and flat-then-straight that stands, and its worst residual in errors."""
    line = _straight(points)
    worst = _worst(points, line)
    if worst <= STRAIGHT or len(points) < 3:
        return line, worst
    hinge = _hinge(points)
    off = _worst(points, hinge)
    return (hinge, off) if off < worst else (line, worst)


def _average(group: Sequence[Point]) -> Point:
    if len(group) == 1:
        return group[0]
    weights = [1 / max(p.error, LEAST_ERROR) ** 2 for p in group]
    total = math.fsum(weights)
    batch = round(math.fsum(w * p.batch for w, p in zip(weights, group, strict=True)) / total)
    rate = math.fsum(w * p.seconds / p.batch for w, p in zip(weights, group, strict=True)) / total
    return Point(batch, rate * batch, 1 / math.sqrt(total))


def _straight(points: Sequence[Point]) -> Line:
    """Least squares of relative residuals, neither part negative; one point alone is taken to be all slope."""
    if len(points) == 1:
        return Line(0.0, points[0].seconds / points[0].batch)
    w = [1 / (max(p.error, LEAST_ERROR) * p.seconds) ** 2 for p in points]
    total = math.fsum(w)
    mean_b = math.fsum(a * p.batch for a, p in zip(w, points, strict=True)) / total
    mean_t = math.fsum(a * p.seconds for a, p in zip(w, points, strict=True)) / total
    spread = math.fsum(a * (p.batch - mean_b) ** 2 for a, p in zip(w, points, strict=True))
    joint = math.fsum(a * (p.batch - mean_b) * (p.seconds - mean_t) for a, p in zip(w, points, strict=True))
    slope = joint / spread
    if slope <= 0:
        return Line(mean_t, 0.0)
    if mean_t - slope * mean_b < 0:
        square = math.fsum(a * p.batch**2 for a, p in zip(w, points, strict=True))
        return Line(0.0, math.fsum(a * p.batch * p.seconds for a, p in zip(w, points, strict=True)) / square)
    return Line(mean_t - slope * mean_b, slope)


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
    w = [1 / (max(p.error, LEAST_ERROR) * p.seconds) ** 2 for p in points]
    total = math.fsum(w)
    mean_b = math.fsum(a * p.batch for a, p in zip(w, points, strict=True)) / total
    mean_t = math.fsum(a * p.seconds for a, p in zip(w, points, strict=True)) / total
    spread = math.fsum(a * (p.batch - mean_b) ** 2 for a, p in zip(w, points, strict=True))
    joint = math.fsum(a * (p.batch - mean_b) * (p.seconds - mean_t) for a, p in zip(w, points, strict=True))
    slope = max(0.0, joint / spread)
    return Line(mean_t - slope * mean_b, slope)


def _level(points: Sequence[Point]) -> float:
    weights = [1 / max(p.error, LEAST_ERROR) ** 2 for p in points]
    return math.fsum(w * p.seconds for w, p in zip(weights, points, strict=True)) / math.fsum(weights)


def _worst(points: Sequence[Point], line: Line) -> float:
    return max(abs(line.seconds(p.batch) / p.seconds - 1) / max(p.error, LEAST_ERROR) for p in points)


def _typical(points: Sequence[Point]) -> float:
    return math.sqrt(math.fsum(p.error**2 for p in points) / len(points))


def _bends(points: Sequence[Point], line: Line) -> list[tuple[int, float]]:
    """(batch, factor on the line) at each point, shrunk towards 1 by the share of its residual that is noise."""
    residuals = [p.seconds / line.seconds(p.batch) - 1 for p in points]
    noise = _typical(points) ** 2
    spread = max(0.0, math.fsum(r * r for r in residuals) / len(points) - noise)
    if spread <= 0:
        return []
    return [
        (p.batch, 1 + r * spread / (spread + max(p.error, LEAST_ERROR) ** 2))
        for p, r in zip(points, residuals, strict=True)
    ]


def _broken(line: Line, points: Sequence[Point], bends: Sequence[tuple[int, float]], straight: bool) -> Curve:
    """Knots of the line and its bends, made monotone; before the first bend and after the last its factor holds."""
    batches = {0.0, *(float(batch) for batch, _ in bends)}
    if line.knee > 0 and not bends:  # a refuted one would hide how time rises between two points
        batches.add(line.knee)
    knots = sorted(batches)
    times: list[float] = []
    for batch in knots:
        time = line.seconds(batch) * _factor(bends, batch)
        times.append(max(time, times[-1]) if times else max(time, 0.0))
    tail = line.slope * (bends[-1][1] if bends else 1.0)
    if not bends and len(knots) == 1:
        knots, times = [0.0, 1.0], [times[0], max(times[0], line.seconds(1.0))]
    return Curve(tuple(knots), tuple(times), tail, 0.0, straight, _typical(points))


def _factor(bends: Sequence[tuple[int, float]], batch: float) -> float:
    if not bends:
        return 1.0
    i = bisect_left(bends, batch, key=lambda bend: bend[0])
    if i == 0:
        return bends[0][1]
    if i == len(bends):
        return bends[-1][1]
    (b0, f0), (b1, f1) = bends[i - 1], bends[i]
    return f0 + (f1 - f0) * (batch - b0) / (b1 - b0)
