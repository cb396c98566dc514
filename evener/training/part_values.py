"""Find out how the value of a whole batch follows from the values of its parts.

The value, such as a loss, can be the mean of the parts' values, weighted by their counts of a unit
such as rows, or the sum of the parts' values. Each of these ways is called a kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SUM = "sum"


def find_fitting(
    whole: float, parts: Sequence[float], counts: Mapping[str, Sequence[float]], rounding: float
) -> list[str]:
    """Return the kinds by which the parts' values combine to the value of the whole.

    `counts` maps the name of a unit to its count in each part, such as {"rows": (3, 5), "labels":
    (20, 61)}. The result has a unit if the parts' mean, weighted by its counts, equals `whole`, and
    it has SUM if the parts add up to `whole`. Values count as equal if they differ by at most
    `rounding`, relative to the largest value.
    """
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
