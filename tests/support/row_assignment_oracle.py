"""A lower bound for a step's time over all assignments of rows to ranks, by all cuts of the batch.

It holds for ranks that differ in speed only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.shares.curves import Cost, RankCost


def least_seconds(lengths: Sequence[int], ranks: Sequence[RankCost]) -> float:
    """Return the bound in seconds.

    It is the larger of (the least cost of the batch / the sum of speeds) and (the time of the
    longest row on the fastest rank).
    """
    alone = [least_alone(lengths, rank.cost) for rank in ranks]
    return max(
        1 / sum(1 / each for each in alone),
        min(rank.cost.seconds(1, max(lengths)) for rank in ranks),
    )


def least_alone(lengths: Sequence[int], cost: Cost) -> float:
    """Return the least cost of the batch on one device.

    Any assignment is also a way to cut the batch, at each rank's own speed.
    """
    ordered = sorted(lengths, reverse=True)
    seconds = [cost.row_seconds(length) for length in ordered]
    least = [0.0] + [math.inf] * len(ordered)
    for stop in range(1, len(least)):
        least[stop] = cost.fixed_s + min(
            least[start] + (stop - start) * seconds[start] for start in range(stop)
        )
    return least[-1]
