"""Which kinds explain the value of a whole batch from the values of its parts.

A kind is the way in which the values combine: a mean weighted by a unit's counts, or a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SUM = "sum"


def find_fitting(
    whole: float, parts: Sequence[float], counts: Mapping[str, Sequence[float]], rounding: float
) -> list[str]:
    """Return the kinds that explain the value of the whole from the values of its parts.

    `counts` maps the name of a unit to its count in each part, such as {"rows": (3, 5), "labels":
    (20, 61)}. A unit fits if the parts' mean, weighted by its counts, equals `whole` within the
    relative `rounding`. SUM fits if the parts add up to `whole`.
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
