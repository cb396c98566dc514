"""A bound that no way to deal rows can beat, by all cuts of the batch; for ranks that differ in
speed only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.shares.curves import Cost, RankCost


def least_seconds(lengths: Sequence[int], ranks: Sequence[RankCost]) -> float:
    """The larger of (the least cost of the batch / the sum of speeds) and (the longest row on the
    fastest rank).
    """
    alone = [least_alone(lengths, rank.cost) for rank in ranks]
    return max(
        1 / sum(1 / each for each in alone),
        min(rank.cost.seconds(1, max(lengths)) for rank in ranks),
    )


def least_alone(lengths: Sequence[int], cost: Cost) -> float:
    """The least cost of the batch on one device: any way to deal is also a way to cut, at each
    rank's own speed.
    """
    ordered = sorted(lengths, reverse=True)
    seconds = [cost.row_seconds(length) for length in ordered]
    least = [0.0] + [math.inf] * len(ordered)
    for stop in range(1, len(least)):
        least[stop] = cost.fixed_s + min(
            least[start] + (stop - start) * seconds[start] for start in range(stop)
        )
    return least[-1]
