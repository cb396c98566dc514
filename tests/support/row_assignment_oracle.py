"""A lower bound for the time of a step over all ways to assign rows to ranks and to cut the batch.

It holds only for ranks that differ in nothing but speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.shares.curves import Cost, RankCost


def least_seconds(lengths: Sequence[int], ranks: Sequence[RankCost]) -> float:
    """Return the bound in seconds.

    It is the larger of two times: the lowest cost of the batch / the sum of speeds, and that of the
    longest row on the fastest rank.
    """
    alone = [least_alone(lengths, rank.cost) for rank in ranks]
    return max(
        1 / sum(1 / each for each in alone),
        min(rank.cost.seconds(1, max(lengths)) for rank in ranks),
    )


def least_alone(lengths: Sequence[int], cost: Cost) -> float:
    """Return the lowest cost of the batch on one device.

    Any assignment to ranks is also a way to cut the batch, with each rank's own speed.
    """
    ordered = sorted(lengths, reverse=True)
    seconds = [cost.row_seconds(length) for length in ordered]
    least = [0.0] + [math.inf] * len(ordered)
    for stop in range(1, len(least)):
        least[stop] = cost.fixed_s + min(
            least[start] + (stop - start) * seconds[start] for start in range(stop)
        )
    return least[-1]
