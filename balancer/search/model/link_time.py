"""Predict how long a gradient exchange takes from the speed of the link between devices.

A ring all-reduce over n ranks sends 2 (n - 1) / n times the bytes of the gradients over each link.
It overlaps with computation, so only the part that computation doesn't hide prolongs a step. The
predictions are lower bounds, because an estimate that is too high could make a search reject a good
layout.
"""

from __future__ import annotations

from ...types import KnownLink

# The largest fraction of a rank's compute time (own work) that hides the exchange: the backward
# pass takes two thirds of the compute time, and a sharded training also gathers parameters during
# the forward pass.
HIDDEN_BY_BACKWARD = 2 / 3
HIDDEN_IN_SHARDS = 1.0
# A sharded training gathers the parameters twice in a pass and reduces the gradients once. Each of
# these three collectives sends half the bytes of an all-reduce.
SHARDS_REDUCES = 1.5


def all_reduce_seconds(size: int, ranks: int, link: KnownLink) -> float:
    """Return the predicted time, in seconds, of a ring all-reduce of `size` bytes.

    `ranks` is the number of ranks. 0 for a single rank, or if the link's speed is unknown.
    """
    # the latency was measured over `link.ranks` ranks, and grows in proportion to the steps of the
    # ring
    if ranks < 2 or link.bytes_per_second <= 0:
        return 0.0
    crossing = 2 * (ranks - 1) / ranks * size
    latency_s = link.latency_seconds * (ranks - 1) / max(1, link.ranks - 1)
    return latency_s + crossing / link.bytes_per_second


def shard_pass_seconds(size: int, ranks: int, link: KnownLink) -> float:
    """Return the predicted time, in seconds, of data transfer in one pass of sharded training.

    `size` is the size of all parameters in bytes. Latency isn't included.
    """
    # the number of collectives depends on how the model is divided into units, which isn't known
    bandwidth = KnownLink(link.ranks, link.bytes_per_second)
    return SHARDS_REDUCES * all_reduce_seconds(size, ranks, bandwidth)
