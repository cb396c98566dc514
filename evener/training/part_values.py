"""Find out how a whole batch's value is computed from its parts' values.

Such a value is, for example, a loss. It can be the sum of the parts' values. Or it is their mean,
weighted by the number of rows, or of another unit, in each part. Each of these ways is called a
kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SUM = "sum"


def find_fitting(
    whole: float, parts: Sequence[float], counts: Mapping[str, Sequence[float]], rounding: float
) -> list[str]:
    """Return the kinds that give the whole's value from the parts' values.

    `counts` maps each unit to its number in each part, such as `{"rows": (3, 5), "labels": (20,
    61)}`. The result contains each unit whose weighted mean of `parts` equals `whole`. It contains
    SUM if their sum does.
    """
    # values count as equal if they differ by at most `rounding`, relative to the largest value
    values = [abs(value) for value in (whole, *parts) if math.isfinite(value)]
    near = rounding * max(values, default=0.0)
    sums = {name: mean_by(parts, each) for name, each in counts.items()}
    sums[SUM] = sum(parts)
    return [name for name, value in sums.items() if abs(value - whole) <= near]


def mean_by(values: Sequence[float], counts: Sequence[float]) -> float:
    """Return the mean of values, weighted by counts; infinite if all counts are 0."""
    # a value with count 0 is ignored: it is NaN if it is a mean over nothing
    total = sum(counts)
    if not total:
        return math.inf
    pairs = zip(values, counts, strict=True)
    return sum(count * value for value, count in pairs if count) / total
