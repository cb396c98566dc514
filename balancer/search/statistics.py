"""Errors of step times, and least squares of lines and rates.

Student's t is tabulated, since SciPy is not a dependency; beyond the table a Cornish-Fisher term gives three digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from evener.shares.curves import ROUNDING

from ..types import Interval, Timed

Sample = tuple[float, float, float]  # x, y, weight
NORMAL_95 = 1.959964  # two-sided 95 % quantile of the normal distribution
CLEAR = 2.0  # standard errors, 95 %: what differs by less may be equal (noisy_slow)
TYPICAL_BLOCKS = 8  # of a probe, which has 5 to 16; turns the half-width of its interval into a standard error
TIE = 0.01  # relative; a smaller difference of speeds isn't worth a change, and one of shares can't be measured
LONE_BLOCK = 0.5  # relative half-width said of a single block, whose spread is unknown
# fmt: off
STUDENT_95 = (  # two-sided 95 % quantiles for 1, 2, ... degrees of freedom
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)
# fmt: on


def student(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; `freedom` is at least 1."""
    if freedom < 1:
        raise ValueError(f"Student's t has at least 1 degree of freedom, not {freedom}")
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    return NORMAL_95 + (NORMAL_95**3 + NORMAL_95) / (4 * freedom)


def relative_half_width(interval: Interval) -> float:
    """Half the interval's width over its value; infinite for a value of 0."""
    return (interval.high - interval.low) / 2 / interval.value if interval.value > 0 else math.inf


def relative_error(seen: Timed) -> float:
    """Relative standard error of a step time, from its 95 % interval."""
    half = (seen.high_seconds - seen.low_seconds) / 2
    return half / seen.step_seconds / student(TYPICAL_BLOCKS - 1) if seen.step_seconds > 0 else 1.0


def rising_line(samples: Sequence[Sample], intercept_not_negative: bool = True) -> tuple[float, float]:
    """(intercept, slope) of y = intercept + slope * x, the slope never negative.

    Where the best intercept would be negative, the line goes through the origin, unless `intercept_not_negative` is
    False. One sample alone is all slope. `samples` must not be empty; weights are 1 / variance of y.
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
    return 0.0, math.fsum(w * x * y for x, y, w in samples) / math.fsum(w * x * x for x, _, w in samples)


def fit_rates(rows: Sequence[Sequence[float]], values: Sequence[float], errors: Sequence[float]) -> tuple[float, ...]:
    """Rates, none negative, with which the sum of rate * amount over each row is nearest to its value.

    Exact, by trying each set of rates that may be above 0. `errors` are standard errors of the values. Amounts that the
    rows can't tell apart get one of the rates alone.
    """
    scaled = [[amount / error for amount in row] for row, error in zip(rows, errors, strict=True)]
    wanted = [value / error for value, error in zip(values, errors, strict=True)]
    columns = [list(column) for column in zip(*scaled, strict=True)]
    used = [i for i, column in enumerate(columns) if any(column)]
    best, least = (0.0,) * len(columns), math.fsum(value * value for value in wanted)
    for size in range(1, len(used) + 1):
        for chosen in combinations(used, size):
            rates = _solve([columns[i] for i in chosen], wanted)
            if rates is None or min(rates) < 0:
                continue
            missed = _distance([columns[i] for i in chosen], rates, wanted)
            if missed < least * (1 - ROUNDING):
                least, by_column = missed, dict(zip(chosen, rates, strict=True))
                best = tuple(by_column.get(i, 0.0) for i in range(len(columns)))
    return best


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _distance(columns: Sequence[Sequence[float]], rates: Sequence[float], wanted: Sequence[float]) -> float:
    found = [_dot(rates, row) for row in zip(*columns, strict=True)]
    return math.fsum((a - b) ** 2 for a, b in zip(found, wanted, strict=True))


def _solve(columns: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """The rates nearest to the wanted values, by Gram-Schmidt; None if the columns don't tell them apart."""
    bases: list[list[float]] = []
    factors: list[list[float]] = []  # of the bases in each column
    for column in columns:
        left, own = list(column), []
        for base in bases:
            factor = _dot(base, left)
            own.append(factor)
            left = [a - factor * b for a, b in zip(left, base, strict=True)]
        size = math.hypot(*left)
        if size <= ROUNDING * math.hypot(*column):
            return None
        bases.append([a / size for a in left])
        factors.append([*own, size])
    rates = [_dot(base, wanted) for base in bases]
    for i in reversed(range(len(rates))):
        rates[i] = (rates[i] - math.fsum(factors[j][i] * rates[j] for j in range(i + 1, len(rates)))) / factors[i][i]
    return rates
