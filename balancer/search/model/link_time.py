"""Predict the time of a gradient exchange from the speed of the link. Pure.

A ring all-reduce over n ranks sends 2 (n - 1) / n times the bytes of the gradients over each link.
The exchange overlaps with computation, so only the excess prolongs a step. Results are lower
bounds, because a search must not reject a layout because of an estimate that may be too high.
"""

from __future__ import annotations

from ...types import KnownLink

# The largest fraction of a rank's compute time (own work) that hides the exchange: the backward
# pass takes two thirds of it, and shards also gather their units during the forward pass.
HIDDEN_BY_BACKWARD = 2 / 3
HIDDEN_IN_SHARDS = 1.0
# Shards gather the parameters twice in a pass and reduce the gradients once. Each sends half the
# bytes of an all-reduce.
SHARDS_REDUCES = 1.5


def all_reduce_seconds(size: int, ranks: int, link: KnownLink) -> float:
    """Return the seconds of an all-reduce of `size` bytes over `ranks` ranks; 0 for a single rank.

    The latency was measured over `link.ranks` ranks, and grows with the steps of the ring.
    """
    if ranks < 2 or link.bytes_per_second <= 0:
        return 0.0
    crossing = 2 * (ranks - 1) / ranks * size
    latency_s = link.latency_seconds * (ranks - 1) / max(1, link.ranks - 1)
    return latency_s + crossing / link.bytes_per_second


def shard_pass_seconds(size: int, ranks: int, link: KnownLink) -> float:
    """Return the seconds in which a pass of shards gathers and reduces its parameters.

    `size` is the number of bytes of the parameters. The latency of the many collectives is left
    out, because the number of units isn't known.
    """
    bandwidth = KnownLink(link.ranks, link.bytes_per_second)
    return SHARDS_REDUCES * all_reduce_seconds(size, ranks, bandwidth)
