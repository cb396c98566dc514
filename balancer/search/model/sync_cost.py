"""What keeping k devices in step costs: c_k = base + each * (k - 1), learnt from the splits measured.

A number of devices that was not measured is believed cheap (optimism in the face of uncertainty): of one known cost
c_k, fewer devices pay in proportion and more pay the same, so that a promising number is tried and then known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Seen = tuple[int, float, float]  # devices, seconds, standard error in seconds


def costs(seen: Sequence[Seen], most: int) -> tuple[float, ...]:
    """Seconds for 0, 1, ... `most` devices, never falling."""
    known = _by_count(seen)
    if not known:
        return (0.0,) * (most + 1)
    if len(known) == 1:
        ((devices, cost, _),) = known
        return tuple(min(cost, cost * max(0, k - 1) / max(1, devices - 1)) for k in range(most + 1))
    base, each = _line(known)
    return tuple(base + each * (k - 1) if k > 1 else 0.0 for k in range(most + 1))


def _by_count(seen: Sequence[Seen]) -> list[Seen]:
    """One weighted mean for each number of devices of 2 or more."""
    counts = sorted({devices for devices, _, _ in seen if devices > 1})
    means = []
    for count in counts:
        same = [(max(0.0, cost), max(error, 1e-9)) for devices, cost, error in seen if devices == count]
        total = math.fsum(1 / error**2 for _, error in same)
        means.append((count, math.fsum(cost / error**2 for cost, error in same) / total, 1 / math.sqrt(total)))
    return means


def _line(known: Sequence[Seen]) -> tuple[float, float]:
    """Weighted least squares of base + each * (k - 1), neither negative."""
    weights = [1 / error**2 for _, _, error in known]
    total = math.fsum(weights)
    mean_k = math.fsum(w * (k - 1) for w, (k, _, _) in zip(weights, known, strict=True)) / total
    mean_c = math.fsum(w * c for w, (_, c, _) in zip(weights, known, strict=True)) / total
    spread = math.fsum(w * (k - 1 - mean_k) ** 2 for w, (k, _, _) in zip(weights, known, strict=True))
    joint = math.fsum(w * (k - 1 - mean_k) * (c - mean_c) for w, (k, c, _) in zip(weights, known, strict=True))
    each = max(0.0, joint / spread)
    base = mean_c - each * mean_k
    if base < 0:
        square = math.fsum(w * (k - 1) ** 2 for w, (k, _, _) in zip(weights, known, strict=True))
        return 0.0, math.fsum(w * (k - 1) * c for w, (k, c, _) in zip(weights, known, strict=True)) / square
    return base, each
