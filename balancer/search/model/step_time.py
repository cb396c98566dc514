"""Fit a device's step time as a non-decreasing function of its batch size.

The measurements are few and noisy. Of these functions, the first that fits them is used:

- a straight line: a fixed cost, and a cost per row
- a plateau (constant time) up to some batch, and a straight line from there
- a piecewise-constant function, because kernels compute rows in tiles
- a line with bends at the measured batches; each measurement's deviation from the line is reduced
  by the fraction of it that noise explains

The function must not decrease, so that it can be inverted. If a larger batch took less time than a
smaller one, the smaller one is therefore assumed to take no longer than the larger one.
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
# relative; two times that differ by less may be on one plateau, and two slopes that differ by less
# may be equal; between batches that differ by less, the rounding of allocators dominates
FLAT_TOLERANCE = 0.05
# relative; least error of any timing: recorded H200 probes differ by ±0.04 %
LEAST_ERROR = 0.0005
# a line fits if no point is off by more than this many of its errors, as in 95 % of small fits
LINE_ERRORS = 2.5
# ratio of two batches: between batches with a larger ratio, a peak may be hidden, and the width of
# plateaus, so passes of texts grow by this factor; with a larger ratio between a batch that ran and
# one that failed, if bytes are unknown, the next batch is the geometric mean of the two
WIDE_GAP = 4
# to fit a piecewise-constant function: one more than a plateau followed by a line needs
FEWEST_POINTS = 4
# fraction of the rise between plateaus by which times on one plateau may differ
PLATEAU_TOLERANCE = 0.04
TILE_ROWS = [1 << power for power in range(12, 0, -1)]  # plateau widths to try, in rows
CURVES_KEPT = 512  # cache size: the curves of 16 devices in about twenty rounds
MOST_PLATEAUS = 200  # in one curve; limits the time to evaluate it

Sample = tuple[float, float, float]  # x, y, weight


class Point(msgspec.Struct, frozen=True):
    """A measured step time.

    The fields are the batch in rows, the time of a step in seconds, the relative standard error of
    this time, and the number of gradient-accumulation passes.
    """

    batch: int
    seconds: float
    error: float
    passes: int = 1

    @property
    def floored_error(self) -> float:
        """The relative standard error, but at least a minimum, because no timing is exact."""
        return max(self.error, LEAST_ERROR)

    @property
    def weight(self) -> float:
        """The weight of the measurement in a least-squares fit."""
        return 1 / self.floored_error**2

    @property
    def tolerance_seconds(self) -> float:
        """How far a fitted curve may be from the measurement, in seconds."""
        return LINE_ERRORS * self.floored_error * self.seconds


def fit_curve(points: Iterable[Point], device_count: int = 1) -> Curve | None:
    """Fit the step time as a function of the batch; None if there are no measurements.

    `device_count` is the number of devices that compute a step together. It matters only for a
    piecewise-constant curve: the more devices, the smaller the batches at which the curve is
    assumed to jump.
    """
    return _fit_points(tuple(points), device_count)


@lru_cache(CURVES_KEPT)
def _fit_points(points: tuple[Point, ...], device_count: int) -> Curve | None:
    merged = merge_points(points)
    if not merged:
        return None
    if len(merged) == 1:
        return _curve_through_one(merged[0])
    line, worst = _simplest_curve(merged)
    error = median(p.error for p in merged)  # a rough point says nothing about the others
    if worst <= LINE_ERRORS:
        return msgspec.structs.replace(line, simple=True, error=error)
    piecewise = fit_piecewise_constant(points)
    if piecewise:
        return piecewise.curve(merged[-1].batch, error, device_count)
    bends = _bend_factors(merged, line)
    if not bends:
        return msgspec.structs.replace(line, simple=False, error=error)
    factors = ((0, bends[0][1]), *bends)
    times = make_rising([line.seconds(batch) * factor for batch, factor in factors])
    batches = tuple(float(batch) for batch, _ in factors)
    return Curve(batches, tuple(times), line.slope * bends[-1][1], False, error)


def _curve_through_one(point: Point) -> Curve:
    """Return a curve through a single measurement.

    It is constant up to the measured batch, and then grows in proportion to the batch.
    """
    batches = (0.0, float(point.batch))
    times = (point.seconds, point.seconds)
    return Curve(batches, times, point.seconds / point.batch, True, point.error)


def merge_points(points: Iterable[Point], batch_tolerance: float = SAME_BATCH) -> list[Point]:
    """Average measurements with nearly the same batch and the same time within noise.

    `batch_tolerance` is the largest relative difference of two batches that are averaged. The
    result is in increasing order of batch.
    """
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: (p.batch, p.seconds, p.error)):
        last = groups[-1] if groups else []
        if last and (point.batch == last[-1].batch or _is_same(last[0], point, batch_tolerance)):
            last.append(point)
        else:
            groups.append([point])
    return [_average(group) for group in groups]


def _is_same(one: Point, other: Point, batch_tolerance: float) -> bool:
    """Whether two measurements have nearly the same batch, and the same time within noise."""
    errors = LINE_ERRORS * (one.floored_error + other.floored_error)
    # beyond noise, the time may jump between the batches
    larger = other.batch / one.batch - 1
    return not larger or (
        larger <= batch_tolerance and abs(other.seconds / one.seconds - 1) <= larger + errors
    )


def _average(group: Sequence[Point]) -> Point:
    if len(group) == 1:
        return group[0]
    total = math.fsum(p.weight for p in group)
    batch = round(math.fsum(p.weight * p.batch for p in group) / total)
    rate = math.fsum(p.weight * p.seconds / p.batch for p in group) / total
    return Point(batch, rate * batch, 1 / math.sqrt(total))


def _simplest_curve(points: Sequence[Point]) -> tuple[Curve, float]:
    """Fit a line, or a plateau followed by a line, whichever fits better.

    Returns the curve and the largest deviation of a measurement from it, in standard errors.
    """
    line = _straight_curve(*rising_line(_weighted(points)))
    worst = _worst_residual(points, line)
    if worst <= LINE_ERRORS or len(points) < 3:
        return line, worst
    curves = [line, *(_plateau_then_line(points, count) for count in range(1, len(points)))]
    return min(
        ((curve, _worst_residual(points, curve)) for curve in curves), key=lambda pair: pair[1]
    )


def _plateau_then_line(points: Sequence[Point], plateau_count: int) -> Curve:
    """Fit a plateau to the first `plateau_count` measurements, and a line to the others."""
    before = points[:plateau_count]
    rest = points[plateau_count:]
    weights = math.fsum(p.weight for p in before)
    plateau = math.fsum(p.weight * p.seconds for p in before) / weights
    if len(rest) > 1:
        fixed, slope = rising_line(_weighted(rest), intercept_not_negative=False)
        return _straight_curve(fixed, slope, plateau)
    # With one point after the plateau, the plateau's end is unknown. The longest possible one is
    # assumed, so the line is as steep as possible.
    left = points[plateau_count - 1]
    slope = max(0.0, (rest[0].seconds - plateau) / max(1, rest[0].batch - left.batch))
    return _straight_curve(plateau - slope * left.batch, slope, plateau)


def _straight_curve(fixed: float, slope: float, least: float = 0.0) -> Curve:
    """Return the curve `fixed + slope * batch`, but at least `least` seconds."""
    if slope > 0 and least > fixed:
        # a plateau up to the batch at which both are equal
        return Curve((0.0, (least - fixed) / slope), (least, least), slope)
    begin = max(least, fixed)
    return Curve((0.0, 1.0), (begin, begin + slope), slope)


def _weighted(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    return [(p.batch, p.seconds, p.weight / p.seconds**2) for p in points]


def _worst_residual(points: Sequence[Point], line: Curve) -> float:
    return max(abs(line.seconds(p.batch) / p.seconds - 1) / p.floored_error for p in points)


def _bend_factors(points: Sequence[Point], line: Curve) -> list[tuple[int, float]]:
    """Return the factor by which the curve deviates from the line at each measured batch.

    The result has a (batch, factor) pair for each batch. The part of a deviation that noise
    explains is left out. Empty if noise explains all deviations.
    """
    residuals = [p.seconds / line.seconds(p.batch) - 1 for p in points]
    noise = math.fsum(p.error**2 for p in points) / len(points)
    spread = max(0.0, math.fsum(r * r for r in residuals) / len(points) - noise)
    if spread <= 0:
        return []
    return [
        # the deviation from the line, without the fraction that noise explains
        (p.batch, 1 + r * spread / (spread + p.floored_error**2))
        for p, r in zip(points, residuals, strict=True)
    ]


def make_rising(times: Sequence[float]) -> list[float]:
    """Lower times where needed, so that no batch takes longer than a larger batch.

    `times` are in increasing order of batch.
    """
    # a larger batch may take less time with a faster kernel, which smaller batches could then use
    # too
    return [max(time, 0.0) for time in accumulate(reversed(times), min)][::-1]


def rising_line(
    samples: Sequence[Sample], intercept_not_negative: bool = True
) -> tuple[float, float]:
    """Fit a line by weighted least squares, with a slope of at least 0.

    Returns the intercept and the slope. With `intercept_not_negative`, a line whose intercept would
    be negative is fitted with an intercept of 0 instead.
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
    """Return the overhead of each additional gradient-accumulation pass, in seconds.

    `steps` are measured steps with several passes, and `curve` is the time of a step with a single
    pass. The overhead is negative if a part of the step, such as the optimizer's, isn't repeated.
    But an additional pass of `rows` rows is assumed to take at least 5 % of a whole step with these
    rows, so that passes never seem nearly free.
    """
    weights = []
    found = []
    for point in steps:
        further = point.passes - 1
        alone = point.passes * curve.seconds(point.batch / point.passes)
        found.append((point.seconds - alone) / further)
        weights.append((further / point.seconds) ** 2 * point.weight)
    mean = math.fsum(w * x for w, x in zip(weights, found, strict=True)) / math.fsum(weights)
    return max(mean, (FLAT_TOLERANCE - 1) * curve.seconds(rows))


# ---------------------------------------------------------------------- piecewise-constant curves


class PiecewiseConstant(msgspec.Struct, frozen=True):
    """A step time that is constant within ranges of batches, and jumps between them.

    Kernels compute rows in tiles, so a batch takes as long as one that fills its last tile. All
    ranges ("plateaus") have the same number of rows, and all jumps the same height. Plateaus are
    numbered from 0, which is the plateau of the smallest measured batch.

    - `first_seconds`: step time of plateau 0.
    - `rise_seconds`: height of each jump.
    - `least_seconds`: the lowest step time; no batch is assumed to be faster.
    - `vertices`: the vertices of the region of parameters that agree with all measurements. Each is
      a tuple (plateaus per row, lowest offset, highest offset), with offsets in plateaus.
    """

    first_seconds: float
    rise_seconds: float
    least_seconds: float
    vertices: tuple[tuple[float, float, float], ...]

    def curve(self, largest: int, error: float, device_count: int = 1) -> Curve:
        """Return the step time as a curve, piecewise constant up to the batch `largest`.

        Beyond that batch, the curve is a straight line. `error` is the relative standard error of a
        typical measurement.

        The batch at which a plateau ends is only known to lie in a range. The more devices there
        are (`device_count`), the smaller the batch that is assumed, because a step waits for its
        slowest device.
        """
        knots: dict[float, float] = {}
        plateaus_per_row = math.fsum(slope for slope, _, _ in self.vertices) / len(self.vertices)
        lowest_offset = min(lowest for _, lowest, _ in self.vertices)
        begin = 0
        first = math.ceil(plateaus_per_row + lowest_offset)
        for plateau in range(first, first + MOST_PLATEAUS):
            earliest_end, latest_end = self._range_of_plateau_end(plateau)
            # A larger fraction x of the range gives devices more rows in the same time, but one
            # device beyond its plateau delays all. For n devices, the expected gain is proportional
            # to x * (1 - x)**n, which is highest at x = 1 / (n + 1).
            end = min(earliest_end + (latest_end - earliest_end) // (device_count + 1), largest)
            if end >= max(begin, 1):
                seconds = max(self.least_seconds, self.first_seconds + self.rise_seconds * plateau)
                knots[float(begin)] = seconds
                knots[float(end)] = seconds
                begin = end + 1
            if end == largest:
                break
        slope = self.rise_seconds * plateaus_per_row
        return Curve(tuple(knots), tuple(knots.values()), slope, error=error)

    def _range_of_plateau_end(self, plateau: int) -> tuple[int, int]:
        """Return the smallest and the largest batch that may be the last one of a plateau."""
        earliest = min(
            math.floor((plateau - highest) / per_row + ROUNDING)
            for per_row, _, highest in self.vertices
        )
        latest = max(
            math.ceil((plateau - lowest) / per_row - ROUNDING) - 1
            for per_row, lowest, _ in self.vertices
        )
        return earliest, max(earliest, latest)


@lru_cache(CURVES_KEPT)
def fit_piecewise_constant(measured: tuple[Point, ...]) -> PiecewiseConstant | None:
    """Fit a piecewise-constant function to measured step times.

    None if no such function fits, or with fewer than four measurements.
    """
    points = merge_points(measured, 0.0)
    if len(points) < FEWEST_POINTS:
        return None
    low = points[0].seconds
    high = points[-1].seconds
    error = max(point.tolerance_seconds for point in points)
    for count in range(1, 2 * len(points)):
        rise = (high - low) / count
        if rise < LINE_ERRORS * error:  # a smaller rise could fit any points
            break
        plateaus = [round((point.seconds - low) / rise) for point in points]
        repeated = len(set(plateaus)) < len(plateaus)
        if repeated and _limits_width(points, plateaus):
            found = _fit_to_plateaus(points, plateaus)
            if found:
                return found
    return None


def _limits_width(points: Sequence[Point], plateaus: Sequence[int]) -> bool:
    """Whether the measurements limit how many rows a plateau may have.

    `plateaus` has the plateau number of each measurement.
    """
    rise = bisect_left(plateaus, plateaus[0] + 1)
    # three plateaus, or two whose nearest batches aren't far apart
    return len(set(plateaus)) > 2 or points[rise].batch <= WIDE_GAP * points[rise - 1].batch


def _fit_to_plateaus(points: Sequence[Point], plateaus: Sequence[int]) -> PiecewiseConstant | None:
    """Fit a piecewise-constant function that puts each measurement on a given plateau.

    `plateaus` has the plateau number of each measurement. None if a measurement deviates by more
    than its error.
    """
    samples = [
        (float(n), p.seconds, 1 / p.tolerance_seconds**2)
        for n, p in zip(plateaus, points, strict=True)
    ]
    # all jumps have the same height, so the times of plateaus are on a line
    first, rise = rising_line(samples, intercept_not_negative=False)
    for plateau, point in zip(plateaus, points, strict=True):
        deviation = abs(first + rise * plateau - point.seconds)
        allowed = point.tolerance_seconds + PLATEAU_TOLERANCE * min(rise, point.seconds)
        if deviation > allowed:
            return None
    vertices = _find_feasible_region([point.batch for point in points], plateaus)
    return PiecewiseConstant(first, rise, points[0].seconds, vertices) if vertices else None


def _find_feasible_region(
    batches: Sequence[int], plateaus: Sequence[int]
) -> tuple[tuple[float, float, float], ...]:
    """Return which parameters of the plateaus agree with the measured batches.

    `plateaus` has the plateau number of each batch. There are two parameters: the number of
    plateaus per row, and an offset in plateaus. The possible values form a region. The result lists
    its vertices, each as a tuple (plateaus per row, lowest offset, highest offset). It is empty if
    no values are possible.
    """
    pairs = list(combinations(zip(batches, plateaus, strict=True), 2))
    # bounds of 1 / width
    low = 1 / batches[-1]
    high = math.inf
    for (b0, n0), (b1, n1) in pairs:
        low = max(low, (n1 - n0 - 1) / (b1 - b0))
        high = min(high, (n1 - n0 + 1) / (b1 - b0))
    if low >= high:
        return ()
    # kernels compute rows in tiles of a power of two, so such a width is preferred
    for width in TILE_ROWS:
        if low <= 1 / width <= high:
            lowest, highest = _offset_range(batches, plateaus, 1 / width)
            if lowest < math.floor(highest):
                return ((1 / width, math.floor(highest), math.floor(highest)),)
    ends = (low, high)
    found = [(per_row, *_offset_range(batches, plateaus, per_row)) for per_row in ends]
    for (b0, n0), (b1, n1) in pairs:
        per_row = (n1 - n0) / (b1 - b0)
        if low < per_row < high:
            lowest, highest = _offset_range(batches, plateaus, per_row)
            at_highest = abs(n0 - per_row * b0 - highest) < ROUNDING
            at_lowest = abs(n0 - 1 - per_row * b0 - lowest) < ROUNDING
            if at_highest or at_lowest:
                found.append((per_row, lowest, highest))
    return tuple(found)


def _offset_range(
    batches: Sequence[int], plateaus: Sequence[int], per_row: float
) -> tuple[float, float]:
    """Return the lowest and the highest offset that puts each batch on its plateau.

    `per_row` is the number of plateaus per row, and the offset is added to `per_row * batch`. The
    sum is the position of a batch, in plateaus. If the lowest offset exceeds the highest, no offset
    is possible.
    """
    highest = min(n - per_row * b for b, n in zip(batches, plateaus, strict=True))
    lowest = max(n - 1 - per_row * b for b, n in zip(batches, plateaus, strict=True))
    return lowest, highest
