"""The time of gradient exchange that isn't hidden behind computation: c = within_k + across_h, from splits.

within_k = base + each * (k - 1) for k devices; across_h is a line too, in the hosts that they are on, above that of as
many devices on one host. For a number never measured it is assumed low (optimism in the face of uncertainty): from one
measured cost, fewer pay in proportion and more pay the same. So a number that looks good gets tried and then measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .regression import rising_line

SyncSample = tuple[int, float, float]  # devices or hosts, seconds, standard error in seconds
ExchangeSample = tuple[int, int, float, float]  # devices, hosts, seconds, standard error in seconds


class ExchangeCosts(msgspec.Struct, frozen=True):
    """Seconds of exchange that isn't hidden, within a host and across hosts."""

    within: tuple[float, ...]  # [k]: of k devices on one host
    across: tuple[float, ...] = (0.0, 0.0)  # [h]: more, if they are on h hosts

    def seconds(self, devices: int, hosts: int) -> float:
        """The seconds of exchange among `devices` devices on `hosts` hosts."""
        return self.within[devices] + self.across[hosts]

    def on(self, hosts: int) -> tuple[float, ...]:
        """The seconds of exchange among k devices on `hosts` hosts, as item k."""
        more = self.across[hosts]
        return tuple(cost + more if k > 1 else cost for k, cost in enumerate(self.within))


def fit_exchange_costs(samples: Sequence[ExchangeSample], devices: int, hosts: int) -> ExchangeCosts:
    """The costs for up to `devices` devices on `hosts` hosts; any never measured on one host count as the network's."""
    within = fit_sync_costs([(k, cost, error) for k, h, cost, error in samples if h == 1], devices)
    across = [(h, cost - within[k], error) for k, h, cost, error in samples if h > 1]
    return ExchangeCosts(within, fit_sync_costs(across, hosts))


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
