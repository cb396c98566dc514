"""A device's seconds(batch): fitted to a few noisy points, monotone, and inverted exactly.

A curve is a rising broken line, rounded up to stairs where the points show a step height. The line is the simplest
that the points allow: straight (fixed cost + cost a sample), or flat up to a knee and straight after it, or one of
these bent through the points, each bend as strong as its evidence exceeds the noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import msgspec

from evener.balancer.search.model.points import LEAST_ERROR, SAME_BATCH, Point, merged, typical
from evener.balancer.search.model.regression import STRAIGHT, Line, simplest
from evener.balancer.search.model.stairs import Seen, Stairs, Straight, stairs

MOST_KEPT = 8192  # fits of one search: of 1024 devices in a few kinds of doubt
EDGE = 1e-6  # of a stair: a time so little above a whole number of them is that number
ROUNDING = 1e-9  # relative slack where a time is compared with its own inverse


class Curve(msgspec.Struct, frozen=True):
    """seconds(batch) as a rising broken line through knots, straight beyond the last; `stair` rounds it up."""

    batches: tuple[float, ...]  # increasing, the first at or below every batch asked for
    times: tuple[float, ...]  # seconds, not decreasing
    slope: float  # seconds a sample beyond the last knot
    stair: float = 0.0  # step height in seconds; 0: smooth
    straight: bool = True  # the points lie on a simple shape within their errors
    error: float = 0.0  # relative standard error of a typical point
    under: tuple[Straight, ...] = ()  # corners of the lines that may lie under its stairs

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

    def levels(self, batch: float) -> range:
        """The numbers of stairs that `batch` may take, by every line that may lie under them; none if it has none."""
        times = [(fixed + slope * batch) / self.stair for fixed, slope in self.under]
        if not times:
            return range(0)
        return range(max(1, math.floor(min(times) + EDGE) + 1), max(1, math.ceil(max(times) - EDGE)) + 1)

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


class Shape(msgspec.Struct, frozen=True):
    """What points look like without stairs: the simplest line and its worst residual in errors."""

    single: tuple[Point, ...]  # one for each batch
    known: tuple[Point, ...]  # one for those that are nearly the same
    line: Line
    worst: float


Points = tuple[Point, ...]
Fit = Callable[[Points, float, bool], Curve | None]


def shaped(points: Points) -> Shape | None:
    """The shape of the points; None without any."""
    single = tuple(merged(points, 0.0))
    known = tuple(merged(single, SAME_BATCH))
    return Shape(single, known, *simplest(known)) if known else None


class Fitting(msgspec.Struct, frozen=True):
    """How curves are fitted: what points look like, and the stairs that they may show."""

    shape: Callable[[Points], Shape | None] = shaped
    stairs: Callable[[tuple[Seen, ...], bool], Stairs | None] = stairs

    def curve(self, points: Points, doubt: float, stepped: bool) -> Curve | None:
        """As `fit` has it."""
        found = self.shape(points)
        if found is None:
            return None
        smooth = found.worst <= STRAIGHT
        if smooth and found.line.flat == 0:
            return _broken(found.line, found.known, [], True)
        if steps := self.stairs(tuple((p.batch, p.seconds, p.error) for p in found.single), stepped or not smooth):
            return _stepped(steps, found.known, doubt)
        curve = _broken(found.line, found.known, [] if smooth else _bends(found.known, found.line), smooth)
        return _late(curve) if doubt >= 1 and not smooth else curve


def fit(points: Iterable[Point], doubt: float = 0.0, stepped: bool = False) -> Curve | None:
    """The curve that explains the points; None without any.

    `doubt`: where stairs or bends leave doubt, 0 takes the middle and 1 the slowest that may be. `stepped`: devices
    like this one show stairs, so they need less evidence here.
    """
    return Fitting().curve(tuple(points), doubt, stepped)


def remembered() -> Fit:
    """`fit` for the length of one search: what was fitted once is not fitted again, and goes when the search does."""
    keep = lru_cache(MOST_KEPT)  # hope, middle and doubt ask for the same shapes and stairs
    return lru_cache(MOST_KEPT)(Fitting(keep(shaped), keep(stairs)).curve)


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
    return Curve(batches, times, slope, found.height, False, typical(points), found.corners)


def _bends(points: Sequence[Point], line: Line) -> list[tuple[int, float]]:
    """(batch, factor on the line) at each point, shrunk towards 1 by the share of its residual that is noise."""
    residuals = [p.seconds / line.seconds(p.batch) - 1 for p in points]
    noise = typical(points) ** 2
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
        time = (line.flat if 0 < batch <= line.knee else line.seconds(batch)) * _factor(bends, batch)
        times.append(max(time, times[-1]) if times else max(time, 0.0))
    tail = line.slope * (bends[-1][1] if bends else 1.0)
    if not bends and len(knots) == 1:
        knots, times = [0.0, 1.0], [times[0], max(times[0], line.seconds(1.0))]
    return Curve(tuple(knots), tuple(times), tail, 0.0, straight, typical(points))


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
