"""Weighted least squares of one straight line: the only regression in the search."""

from __future__ import annotations

import math
from collections.abc import Sequence

Sample = tuple[float, float, float]  # x, y, weight


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
