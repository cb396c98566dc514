"""Which hosts of a cluster should share a step, where exchange across hosts costs more than within one.

For a finish time tau and h hosts, the best hosts are those whose devices do most samples by tau. A sweep over tau finds
the h hosts of the highest rate; one with few hosts tries every set of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

from evener import waterfill
from evener.balancer.search.model.sync_cost import ExchangeCosts
from evener.waterfill import Allocation, Costs, DeviceCurve

FEW_HOSTS = 3  # up to this many, every set of hosts is tried
LIKELY_SETS = 2  # beyond: as many sets as the sweep finds best, and all hosts
SWEEPS, STEPS = 2, 40  # over all finish times, then between the neighbours of the best
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
    times = waterfill.finish_times(devices, quantum)
    rates: dict[HostSet, float] = {}
    for _ in range(SWEEPS):
        best = _sweep(devices, hosts, costs, quantum, batch, times, rates)
        early, late = times[max(0, best - 1)], times[min(len(times) - 1, best + 1)]
        times = [early + (late - early) * n / STEPS for n in range(STEPS + 1)]
    return list(dict.fromkeys((*sorted(rates, key=lambda one: -rates[one])[:LIKELY_SETS], every)))


def _sweep(
    devices: Sequence[DeviceCurve],
    hosts: Sequence[int],
    costs: ExchangeCosts,
    quantum: int,
    batch: int | None,
    times: Sequence[float],
    rates: dict[HostSet, float],
) -> int:
    """Adds the samples/s of the best hosts of each finish time, all their devices taking part; which time is best."""
    top, best = 0.0, 0
    for n, seconds in enumerate(times):
        done: dict[int, list[int]] = {}
        for device in devices:
            if size := device.curve.largest(seconds, device.limit, quantum):
                done.setdefault(hosts[device.position], []).append(size)
        order = sorted(done, key=lambda host: -sum(done[host]))
        rate, taken = _best_count(seconds, [done[host] for host in order], costs, batch)
        if rate > 0 and math.isfinite(rate):
            chosen = frozenset(order[:taken])
            rates[chosen] = max(rate, rates.get(chosen, 0.0))
            top, best = max((top, best), (rate, n))
    return best


def _best_count(
    seconds: float, done: Sequence[Sequence[int]], costs: ExchangeCosts, batch: int | None
) -> tuple[float, int]:
    """The most samples/s of the first hosts of these, and how many they are, with what each of their devices does."""
    best, count, samples = (0.0, 0), 0, 0
    for taken, sizes in enumerate(done, 1):
        count, samples = count + len(sizes), samples + sum(sizes)
        step = seconds + costs.seconds(count, taken)
        if step > 0 and (batch is None or samples >= batch):
            rate = (samples if batch is None else batch) / step
            best = max(best, (rate, taken), key=lambda one: one[0])
    return best
