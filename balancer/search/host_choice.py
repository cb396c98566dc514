"""The choice of a cluster's hosts that share a step, where exchange across hosts costs more than within one.

For a finish time tau and h hosts, the best hosts are those whose devices do most samples by tau. Of few hosts every set
is tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations

from evener.shares import waterfill
from evener.shares.waterfill import Allocation, Costs, DeviceCurve

from .model.sync_cost import ExchangeCosts

FEW_HOSTS = 3  # up to this many, every set of hosts is tried
LIKELY_SETS = 2  # beyond: this many of the best, and all hosts: no worse than every set on 240 random clusters of 4
HALVINGS = 6  # of the time between two bends of a curve
Solve = Callable[[Sequence[DeviceCurve], Costs], Allocation | None]
HostSet = frozenset[int]


def split_over_hosts(
    devices: Sequence[DeviceCurve],
    hosts: Sequence[int],
    costs: ExchangeCosts,
    solve: Solve,
    quantum: int = 1,
    batch: int | None = None,
) -> Allocation | None:
    """The fastest allocation that `solve` finds on any likely set of hosts; `hosts` has the host of each position."""
    found = [
        solve([device for device in devices if hosts[device.position] in chosen], costs.on(len(chosen)))
        for chosen in _likely_sets(devices, hosts, costs, quantum, batch)
    ]
    return max((one for one in found if one), key=lambda one: one.samples_per_second, default=None)


def _likely_sets(
    devices: Sequence[DeviceCurve], hosts: Sequence[int], costs: ExchangeCosts, quantum: int, batch: int | None
) -> list[HostSet]:
    every = frozenset(hosts[device.position] for device in devices)
    if len(every) < 2 or not any(costs.across):
        return [every]
    if len(every) <= FEW_HOSTS:
        sizes = range(1, len(every) + 1)
        return [frozenset(some) for size in sizes for some in combinations(sorted(every), size)]
    rates = _rate_sets(devices, hosts, costs, quantum, batch)
    return list(dict.fromkeys((*sorted(rates, key=lambda one: -rates[one])[:LIKELY_SETS], every)))


def _rate_sets(
    devices: Sequence[DeviceCurve], hosts: Sequence[int], costs: ExchangeCosts, quantum: int, batch: int | None
) -> dict[HostSet, float]:
    """The samples/s of the hosts that do most by a finish time, all their devices taking part.

    Of a fixed batch, each number of hosts has one finish time: when they have done it.
    """
    times = waterfill.finish_times(devices, quantum)
    done = cache(lambda seconds: _done_by(devices, hosts, seconds, quantum))

    def reaches(seconds: float, taken: int) -> bool:
        return sum(map(sum, done(seconds)[1][:taken])) >= (batch or 0)

    rates: dict[HostSet, float] = {}
    for taken in range(1, len({hosts[device.position] for device in devices}) + 1):
        for seconds in times if batch is None else _first_end(times, partial(reaches, taken=taken)):
            order, sizes = done(seconds)
            count, samples = sum(map(len, sizes[:taken])), sum(map(sum, sizes[:taken]))
            if count > 1:
                chosen = frozenset(order[:taken])
                rate = (batch or samples) / (seconds + costs.seconds(count, taken))
                rates[chosen] = max(rate, rates.get(chosen, 0.0))
    return rates


def _done_by(
    devices: Sequence[DeviceCurve], hosts: Sequence[int], seconds: float, quantum: int
) -> tuple[list[int], list[list[int]]]:
    """The hosts, those that do most by then first, and what each of their devices does."""
    done: dict[int, list[int]] = {}
    for device in devices:
        if size := device.curve.largest(seconds, device.limit, quantum):
            done.setdefault(hosts[device.position], []).append(size)
    order = sorted(done, key=lambda host: -sum(done[host]))
    return order, [done[host] for host in order]


def _first_end(times: Sequence[float], reached: Callable[[float], bool]) -> list[float]:
    """The first time at which it is reached, nearly; nothing if it never is."""
    at = bisect_left(times, True, key=reached)
    if at == len(times):
        return []
    early, late = times[max(0, at - 1)], times[at]
    for _ in range(HALVINGS):
        middle = (early + late) / 2
        early, late = (early, middle) if reached(middle) else (middle, late)
    return [late]
