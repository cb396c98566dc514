"""Find out whether a batch's value, such as its loss, is the sum or a mean of its parts' values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SUM = "sum"


def find_fitting(
    whole: float, parts: Sequence[float], counts: Mapping[str, Sequence[float]], rounding: float
) -> list[str]:
    """Find out whether a batch's value is the sum or a mean of the values of its parts.

    `whole` is the value of the batch, and `parts` are the values of its parts. `counts` maps the
    name of each possible mean to the parts' weights, such as `{"rows": (3, 5)}`. Returns the names
    of the means that equal `whole`, and "sum" if the sum does. `rounding` is the allowed relative
    difference.
    """
    # values count as equal if they differ by at most `rounding`, relative to the largest value
    values = [abs(value) for value in (whole, *parts) if math.isfinite(value)]
    near = rounding * max(values, default=0.0)
    sums = {name: mean_by(parts, each) for name, each in counts.items()}
    sums[SUM] = sum(parts)
    return [name for name, value in sums.items() if abs(value - whole) <= near]


def mean_by(values: Sequence[float], counts: Sequence[float]) -> float:
    """Return the mean of values, weighted by `counts`, or inf if all counts are 0."""
    # a value with count 0 is ignored: it is NaN if it is a mean over nothing
    total = sum(counts)
    if not total:
        return math.inf
    pairs = zip(values, counts, strict=True)
    return sum(count * value for value, count in pairs if count) / total
