"""Which splits over some of the devices should have most of an objective that counts what the devices cost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from evener.balancer.objectives.objective import Objective
from evener.balancer.search.predictions import Predictions
from evener.waterfill import Allocation

MOST_TO_COMBINE = 6  # devices, of which every set is tried; of more, the most efficient 2, 3, ...
BEST = 2  # splits that are worth a measurement


def most_efficient(predictions: Predictions, objective: Objective) -> list[Allocation]:
    """The best splits over fewer than all devices, of those that are fast enough; none before any cost is known."""
    problem = predictions.model.problem
    costs = objective.costs(predictions.model.seen.all_timed(), problem.devices)
    if not costs:
        return []

    def value(one: Allocation) -> float:
        shares = dict(one.shares)
        cost = sum(active if i in shares else idle for i, (active, idle) in enumerate(costs))
        return one.samples_per_second / cost if cost else 0.0

    tops = [one.samples_per_second for one in (predictions.fastest_split, predictions.fastest_single) if one]
    found = [one for group in _groups(predictions, costs) if (one := predictions.split_over(group))]
    enough = [one for one in found if one.samples_per_second >= (1 - problem.max_slowdown) * max(tops, default=0.0)]
    return sorted(enough, key=value, reverse=True)[:BEST]


def _groups(predictions: Predictions, costs: list[tuple[float, float]]) -> Iterator[tuple[int, ...]]:
    live = predictions.model.live
    counts = range(2, len(live))
    if len(live) <= MOST_TO_COMBINE:
        yield from (group for count in counts for group in combinations(live, count))
        return
    rates = {i: one.samples_per_second for i in live if (one := predictions.single(i))}
    order = sorted(live, key=lambda i: -rates.get(i, 0.0) / max(1.0, costs[i][0]))
    yield from (tuple(order[:count]) for count in counts)
