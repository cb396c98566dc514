"""Which splits over some of the devices should train most samples per joule, by what each device was seen to draw."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from evener.balancer.search.predictions import Predictions
from evener.balancer.types import Timed
from evener.shares.waterfill import Allocation

MOST_TO_COMBINE = 6  # devices, of which every set is tried; of more, the most efficient 2, 3, ...
BEST = 2  # splits that are worth a measurement


def most_efficient(predictions: Predictions, slowdown: float) -> list[Allocation]:
    """The best splits over fewer than all devices, of those that are fast enough; none before any power is known."""
    drawn = [_watts(predictions.model.seen.all_timed(), i) for i in range(predictions.model.problem.devices)]
    if not any(active for active, _ in drawn):
        return []

    def samples_per_joule(one: Allocation) -> float:
        shares = dict(one.shares)
        watts = sum(active if i in shares else idle for i, (active, idle) in enumerate(drawn))
        return one.samples_per_second / watts if watts else 0.0

    tops = [one.samples_per_second for one in (predictions.fastest_split, predictions.fastest_single) if one]
    found = [one for group in _groups(predictions, drawn) if (one := predictions.split_over(group))]
    enough = [one for one in found if one.samples_per_second >= (1 - slowdown) * max(tops, default=0.0)]
    return sorted(enough, key=samples_per_joule, reverse=True)[:BEST]


def _groups(predictions: Predictions, drawn: list[tuple[float, float]]) -> Iterator[tuple[int, ...]]:
    live = predictions.model.live
    counts = range(2, len(live))
    if len(live) <= MOST_TO_COMBINE:
        yield from (group for count in counts for group in combinations(live, count))
        return
    rates = {i: one.samples_per_second for i in live if (one := predictions.single(i))}
    order = sorted(live, key=lambda i: -rates.get(i, 0.0) / max(1.0, drawn[i][0]))
    yield from (tuple(order[:count]) for count in counts)


def _watts(timed: list[Timed], position: int) -> tuple[float, float]:
    """The most that a device drew while it trained, and the least while others did; 0 where that is unknown."""
    seen = [(position in one.probe.layout.active, one.watts[position]) for one in timed if one.watts]
    active = [watts for trains, watts in seen if trains and watts]
    idle = [watts for trains, watts in seen if not trains and watts]
    return max(active, default=0.0), min(idle, default=0.0)
