"""Fits a device's step time as a rising function of its batch.

The points are few and noisy, and the curve is the simplest that fits them:

- a straight line (fixed cost + cost per sample)
- flat up to some batch, and a line from there
- a step function, because kernels compute rows in tiles ("stairs")
- a line that is bent towards the points; each point's deviation from the line is shrunk by the
  fraction that noise explains

The curve must rise so that it can be inverted. If a larger batch took less time than a smaller one,
the smaller one is therefore assumed to need no more time than the larger.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from statistics import median

import msgspec

from evener.shares.curves import ROUNDING, Curve

# relative; points that are closer are merged, because the slope between them would be noise
SAME_BATCH = 0.02
# relative; times that differ by less may be level, and slopes equal; between batches that differ by
# less, the rounding of allocators dominates
LEVEL = 0.05
# relative; least error of any timing: recorded H200 probes differ by ±0.04 %
LEAST_ERROR = 0.0005
# a line fits if no point is off by more than this many of its errors, as in 95 % of small fits
LINE_ERRORS = 2.5
# ratio of two batches: a wider gap may hide a peak and the width of stairs, so passes of texts grow
# by this factor; a wider gap between a batch that ran and one that failed, with unknown bytes, is
# cut at its geometric mean
WIDE = 4
FEWEST = 4  # points of stairs: one more than a level stretch followed by a line needs
LEAN = 0.04  # fraction of the rise by which time may differ within one level of the stairs
TILES = [1 << power for power in range(12, 0, -1)]  # samples; stair widths that are tried
CURVES_KEPT = 512  # cache size: the curves of 16 devices in about twenty rounds
MOST_STAIRS = 200  # in one curve; limits the time to evaluate it

Sample = tuple[float, float, float]  # x, y, weight


class Point(msgspec.Struct, frozen=True):
    """A measured step time: batch, seconds, relative standard error, and number of passes."""

    batch: int
    seconds: float
    error: float
    passes: int = 1

    @property
    def sure_error(self) -> float:
        """The relative standard error, raised to a minimum because no timing is exact."""
        return max(self.error, LEAST_ERROR)

    @property
    def weight(self) -> float:
        """The weight of the measurement in a least-squares fit."""
        return 1 / self.sure_error**2

    @property
    def tolerance_seconds(self) -> float:
        """The largest difference, in seconds, between the measurement and a curve that fits it."""
        return LINE_ERRORS * self.sure_error * self.seconds


def fit_curve(points: Iterable[Point], among: int = 1) -> Curve | None:
    """Fit a curve of the step time by batch; None if there are no measurements.

    `among` is the number of devices in a step. The more there are, the more cautious is a
    step-shaped curve about where it jumps.
    """
    return _fit_points(tuple(points), among)


@lru_cache(CURVES_KEPT)
def _fit_points(points: tuple[Point, ...], among: int) -> Curve | None:
    merged = merge_points(points)
    if not merged:
        return None
    if len(merged) == 1:
        return _level_curve(merged[0])
    line, worst = _simplest_curve(merged)
    error = median(p.error for p in merged)  # a rough point says nothing about the others
    if worst <= LINE_ERRORS:
        return msgspec.structs.replace(line, simple=True, error=error)
    stairs = fit_stairs(points)
    if stairs:
        return stairs.curve(merged[-1].batch, error, among)
    bends = _bend_factors(merged, line)
    if not bends:
        return msgspec.structs.replace(line, simple=False, error=error)
    factors = ((0, bends[0][1]), *bends)
    times = make_rising([line.seconds(batch) * factor for batch, factor in factors])
    batches = tuple(float(batch) for batch, _ in factors)
    return Curve(batches, tuple(times), line.slope * bends[-1][1], False, error)


def _level_curve(point: Point) -> Curve:
    """Return a curve through one measurement: flat up to it, then in proportion to the batch."""
    batches = (0.0, float(point.batch))
    times = (point.seconds, point.seconds)
    return Curve(batches, times, point.seconds / point.batch, True, point.error)


def merge_points(points: Iterable[Point], near: float = SAME_BATCH) -> list[Point]:
    """Average measurements whose batches and times hardly differ, in increasing order of batch.

    `near` is the largest relative difference of the batches.
    """
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: (p.batch, p.seconds, p.error)):
        last = groups[-1] if groups else []
        if last and (point.batch == last[-1].batch or _is_same(last[0], point, near)):
            last.append(point)
        else:
            groups.append([point])
    return [_average(group) for group in groups]


def _is_same(one: Point, other: Point, near: float) -> bool:
    """Whether two measurements have nearly the same batch, and the same time within noise."""
    errors = LINE_ERRORS * (one.sure_error + other.sure_error)
    # beyond noise, the time may jump between the batches
    larger = other.batch / one.batch - 1
    return not larger or (
        larger <= near and abs(other.seconds / one.seconds - 1) <= larger + errors
    )


def _average(group: Sequence[Point]) -> Point:
    if len(group) == 1:
        return group[0]
    total = math.fsum(p.weight for p in group)
    batch = round(math.fsum(p.weight * p.batch for p in group) / total)
    rate = math.fsum(p.weight * p.seconds / p.batch for p in group) / total
    return Point(batch, rate * batch, 1 / math.sqrt(total))


def _simplest_curve(points: Sequence[Point]) -> tuple[Curve, float]:
    """Return a line, or a flat curve followed by a line, whichever fits better.

    The second value is the largest deviation of a measurement, in standard errors.
    """
    line = _straight_curve(*rising_line(_weighted(points)))
    worst = _worst_residual(points, line)
    if worst <= LINE_ERRORS or len(points) < 3:
        return line, worst
    curves = [line, *(_knee_curve(points, cut) for cut in range(1, len(points)))]
    return min(
        ((curve, _worst_residual(points, curve)) for curve in curves), key=lambda pair: pair[1]
    )


def _knee_curve(points: Sequence[Point], cut: int) -> Curve:
    """Return a curve that is flat through the first `cut` measurements, then a line."""
    before = points[:cut]
    rest = points[cut:]
    weights = math.fsum(p.weight for p in before)
    level = math.fsum(p.weight * p.seconds for p in before) / weights
    if len(rest) > 1:
        fixed, slope = rising_line(_weighted(rest), intercept_not_negative=False)
        return _straight_curve(fixed, slope, level)
    # one point on the slope: the knee is unknown; the line is steepest after the longest level
    # stretch
    left = points[cut - 1]
    slope = max(0.0, (rest[0].seconds - level) / max(1, rest[0].batch - left.batch))
    return _straight_curve(level - slope * left.batch, slope, level)


def _straight_curve(fixed: float, slope: float, flat: float = 0.0) -> Curve:
    """Return the curve `fixed + slope * batch`, but at least `flat` seconds."""
    if slope > 0 and flat > fixed:
        # level up to the knee, where both terms are equal
        return Curve((0.0, (flat - fixed) / slope), (flat, flat), slope)
    begin = max(flat, fixed)
    return Curve((0.0, 1.0), (begin, begin + slope), slope)


def _weighted(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    return [(p.batch, p.seconds, p.weight / p.seconds**2) for p in points]


def _worst_residual(points: Sequence[Point], line: Curve) -> float:
    return max(abs(line.seconds(p.batch) / p.seconds - 1) / p.sure_error for p in points)


def _bend_factors(points: Sequence[Point], line: Curve) -> list[tuple[int, float]]:
    """Return each measurement's ratio to the line, with the effect of noise removed.

    Empty if noise explains all deviations from the line.
    """
    residuals = [p.seconds / line.seconds(p.batch) - 1 for p in points]
    noise = math.fsum(p.error**2 for p in points) / len(points)
    spread = max(0.0, math.fsum(r * r for r in residuals) / len(points) - noise)
    if spread <= 0:
        return []
    return [
        # the deviation from the line, without the fraction that noise explains
        (p.batch, 1 + r * spread / (spread + p.sure_error**2))
        for p, r in zip(points, residuals, strict=True)
    ]


def make_rising(times: Sequence[float]) -> list[float]:
    """Lower the times where needed, so that no batch takes longer than a larger one."""
    # a larger batch may take less time with a faster kernel, which smaller batches could then use
    # too
    return [max(time, 0.0) for time in accumulate(reversed(times), min)][::-1]


def rising_line(
    samples: Sequence[Sample], intercept_not_negative: bool = True
) -> tuple[float, float]:
    """Fit a line by weighted least squares, with a slope of at least 0.

    Returns the intercept and the slope. `intercept_not_negative` forces a line with a negative
    intercept through 0.
    """
    total = math.fsum(w for _, _, w in samples)
    mean_x = math.fsum(w * x for x, _, w in samples) / total
    mean_y = math.fsum(w * y for _, y, w in samples) / total
    spread = math.fsum(w * (x - mean_x) ** 2 for x, _, w in samples)
    if spread <= 0:
        return 0.0, mean_y / mean_x
    joint = math.fsum(w * (x - mean_x) * (y - mean_y) for x, y, w in samples)
    slope = max(0.0, joint / spread)
    intercept = mean_y - slope * mean_x
    if intercept >= 0 or not intercept_not_negative:
        return intercept, slope
    squares = math.fsum(w * x * x for x, _, w in samples)
    return 0.0, math.fsum(w * x * y for x, y, w in samples) / squares


def fit_pass_overhead(steps: Sequence[Point], curve: Curve, rows: int) -> float:
    """Return the overhead of each further gradient-accumulation pass, in seconds.

    `steps` are measured steps with several passes, and `curve` gives the time of single passes. The
    overhead may be negative, but a further pass of `rows` rows always takes at least 5 % of a
    single pass.
    """
    # a pass of `rows` rows is assumed to take at least `LEVEL` (5 %) of the time of these rows, so
    # that further passes never seem nearly free
    weights = []
    found = []
    for point in steps:
        further = point.passes - 1
        alone = point.passes * curve.seconds(point.batch / point.passes)
        found.append((point.seconds - alone) / further)
        weights.append((further / point.seconds) ** 2 * point.weight)
    # negative if a part of a step, such as the optimizer's, isn't repeated in each pass
    mean = math.fsum(w * x for w, x in zip(weights, found, strict=True)) / math.fsum(weights)
    return max(mean, (LEVEL - 1) * curve.seconds(rows))


# ---------------------------------------------------------------------- stairs


class Stairs(msgspec.Struct, frozen=True):
    """A step-shaped curve: times rise in equal steps, because kernels compute rows in tiles.

    - `first`, `rise`: seconds of level 0, and of each further level.
    - `least`: the lowest time in seconds.
    - `corners`: the extreme combinations that fit the points: levels per row, and the lowest
      and the highest shift in levels.
    """

    first: float
    rise: float
    least: float
    corners: tuple[tuple[float, float, float], ...]

    def curve(self, largest: int, error: float, among: int = 1) -> Curve:
        """Return the step function as a curve up to the batch `largest`.

        The batch at which a level ends is known only as a range. With more devices (`among`), a
        smaller batch of it is assumed, because one late device delays all. `error` is the relative
        standard error of a typical point. Beyond the steps, the curve is a straight line.
        """
        # the batch at which a level ends is known only to be in a range; the curve assumes a
        # smaller batch of this range for more devices
        knots: dict[float, float] = {}
        levels_per_sample = math.fsum(slope for slope, _, _ in self.corners) / len(self.corners)
        lowest_shift = min(least for _, least, _ in self.corners)
        begin = 0
        first_level = math.ceil(levels_per_sample + lowest_shift)
        for level in range(first_level, first_level + MOST_STAIRS):
            earliest_end, latest_end = self._range_of_level_end(level)
            # A larger fraction x of the range gives devices more rows in the same time, but one
            # device beyond its level delays all. For n devices, the expected gain is proportional
            # to x * (1 - x)**n, which is highest at x = 1 / (n + 1).
            end = min(earliest_end + (latest_end - earliest_end) // (among + 1), largest)
            if end >= max(begin, 1):
                seconds = max(self.least, self.first + self.rise * level)
                knots[float(begin)] = seconds
                knots[float(end)] = seconds
                begin = end + 1
            if end == largest:
                break
        return Curve(
            tuple(knots), tuple(knots.values()), self.rise * levels_per_sample, error=error
        )

    def _range_of_level_end(self, level: int) -> tuple[int, int]:
        """Return the smallest and the largest batch at which a level may end."""
        earliest = min(
            math.floor((level - most) / each + ROUNDING) for each, _, most in self.corners
        )
        latest = max(
            math.ceil((level - least) / each - ROUNDING) - 1 for each, least, _ in self.corners
        )
        return earliest, max(earliest, latest)


@lru_cache(CURVES_KEPT)
def fit_stairs(measured: tuple[Point, ...]) -> Stairs | None:
    """Fit a step function to measured step times.

    None if it doesn't fit, or with fewer than four measurements.
    """
    points = merge_points(measured, 0.0)
    if len(points) < FEWEST:
        return None
    low = points[0].seconds
    high = points[-1].seconds
    error = max(point.tolerance_seconds for point in points)
    for count in range(1, 2 * len(points)):
        rise = (high - low) / count
        if rise < LINE_ERRORS * error:  # a smaller rise could fit any points
            break
        levels = [round((point.seconds - low) / rise) for point in points]
        repeated = len(set(levels)) < len(levels)
        if repeated and _shows_width(points, levels):
            found = _fit_stairs_to_levels(points, levels)
            if found:
                return found
    return None


def _shows_width(points: Sequence[Point], levels: Sequence[int]) -> bool:
    """Whether the measurements limit how many rows one level of the step function has."""
    rise = bisect_left(levels, levels[0] + 1)
    # three levels, or two whose nearest batches aren't far apart
    return len(set(levels)) > 2 or points[rise].batch <= WIDE * points[rise - 1].batch


def _fit_stairs_to_levels(points: Sequence[Point], levels: Sequence[int]) -> Stairs | None:
    """Return the step function in which each measurement is on the given level.

    None if a measurement deviates by more than its error.
    """
    # levels are counted from 0 at the smallest batch
    samples = [
        (float(n), p.seconds, 1 / p.tolerance_seconds**2)
        for n, p in zip(levels, points, strict=True)
    ]
    first, rise = rising_line(samples, intercept_not_negative=False)
    for level, point in zip(levels, points, strict=True):
        # levels are at equal distances
        missed = abs(first + rise * level - point.seconds)
        if missed > point.tolerance_seconds + LEAN * min(rise, point.seconds):
            return None
    places = _find_feasible_region([point.batch for point in points], levels)
    return Stairs(first, rise, points[0].seconds, places) if places else None


def _find_feasible_region(
    batches: Sequence[int], levels: Sequence[int]
) -> tuple[tuple[float, float, float], ...]:
    """Return which step-shaped curves put each measured batch on its given level.

    Each is described by its levels per row and its shift. The result has the extreme combinations;
    it is empty if there is none.
    """
    pairs = list(combinations(zip(batches, levels, strict=True), 2))
    # bounds of 1 / width
    low = 1 / batches[-1]
    high = math.inf
    for (b0, n0), (b1, n1) in pairs:
        low = max(low, (n1 - n0 - 1) / (b1 - b0))
        high = min(high, (n1 - n0 + 1) / (b1 - b0))
    if low >= high:
        return ()
    # kernels compute rows in tiles of a power of two, so such a width is preferred
    for width in TILES:
        if low <= 1 / width <= high:
            least, most = _shifts(batches, levels, 1 / width)
            if least < math.floor(most):
                return ((1 / width, math.floor(most), math.floor(most)),)
    found = [(low, *_shifts(batches, levels, low)), (high, *_shifts(batches, levels, high))]
    for (b0, n0), (b1, n1) in pairs:
        each = (n1 - n0) / (b1 - b0)
        if low < each < high:
            least, most = _shifts(batches, levels, each)
            at_most = abs(n0 - each * b0 - most) < ROUNDING
            at_least = abs(n0 - 1 - each * b0 - least) < ROUNDING
            if at_most or at_least:
                found.append((each, least, most))
    return tuple(found)


def _shifts(batches: Sequence[int], levels: Sequence[int], each: float) -> tuple[float, float]:
    """Return how far a step-shaped curve may be shifted if each batch is to be on its level.

    The result is the lowest and the highest shift, in levels. `each` is the number of levels per
    row.
    """
    # no shift is possible if the lowest exceeds the highest
    most = min(n - each * b for b, n in zip(batches, levels, strict=True))
    return max(n - 1 - each * b for b, n in zip(batches, levels, strict=True)), most
