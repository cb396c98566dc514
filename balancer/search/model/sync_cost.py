"""The time of gradient exchange that isn't hidden behind computation: c_k = base + each * (k - 1), from splits.

For a number of devices never measured, c_k is assumed low (optimism in the face of uncertainty): from one measured
cost, fewer devices pay in proportion and more pay the same. So a promising number gets tried and then measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.balancer.search.model.regression import rising_line

SyncSample = tuple[int, float, float]  # devices, seconds, standard error in seconds


def fit_sync_costs(samples: Sequence[SyncSample], most: int) -> tuple[float, ...]:
    """Seconds for 0, 1, ... `most` devices, never falling."""
    means = _mean_by_count(samples)
    if not means:
        return (0.0,) * (most + 1)
    if len(means) == 1:
        ((devices, cost, _),) = means
        return tuple(min(cost, cost * max(0, k - 1) / max(1, devices - 1)) for k in range(most + 1))
    base, each = rising_line([(k - 1, cost, 1 / error**2) for k, cost, error in means])
    return tuple(base + each * (k - 1) if k > 1 else 0.0 for k in range(most + 1))


def _mean_by_count(samples: Sequence[SyncSample]) -> list[SyncSample]:
    """One weighted mean for each number of devices of 2 or more."""
    means = []
    for count in sorted({devices for devices, _, _ in samples if devices > 1}):
        same = [(max(0.0, cost), max(error, 1e-9)) for devices, cost, error in samples if devices == count]
        total = math.fsum(1 / error**2 for _, error in same)
        means.append((count, math.fsum(cost / error**2 for cost, error in same) / total, 1 / math.sqrt(total)))
    return means
