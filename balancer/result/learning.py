"""Estimate what the recommended batch size means for learning and for the learning rate."""

from __future__ import annotations

import math

import msgspec

from evener.training.noise_scale import ENDLESS, NoiseScale, efficiency, extra_rows, rate_gain

from ..request import Request
from ..search.report import SearchReport
from ..verdict import Learning

# global batch, samples/s, and samples/s in small batches that learn as fast
Point = tuple[int, float, float]


def find_learning(request: Request, report: SearchReport) -> Learning | None:
    """Return how the recommended global batch affects learning.

    Returns None if that is unknown. The request must have the gradient noise scale, or the batch
    size of the user's script.
    """
    layout = report.chosen.layout
    scale = request.noise_scale
    own = request.own_batch
    batch = layout.global_batch
    if not layout.traits.by_shares:
        return None
    found = Learning(batch)
    if scale is not None and request.global_batch is None:
        found = _find_sample_worth(scale, own, report)
    if own is not None and own != batch:
        gain = rate_gain(own, batch, scale.safe_rows) if scale else batch / own
        found = msgspec.structs.replace(
            found,
            own_batch=own,
            adam_rate=(batch / own) ** 0.5,
            sgd_rate=gain,
            sgd_rule="adascale" if scale else "linear",
        )
    return None if found == Learning(batch) else found


def _find_sample_worth(scale: NoiseScale, own_batch: int | None, report: SearchReport) -> Learning:
    """Return how much each sample of the recommended batch contributes to learning.

    The contribution is relative to that of a sample in a very small batch. The result also contains
    the contribution for other measured batches. `own_batch` is the batch size of the user's script,
    or None. If the speed at that size is known, the result compares the two sizes: their speeds,
    and the samples that each needs to reach the same loss.
    """
    chosen = report.chosen
    batch = chosen.layout.global_batch
    value, low, high = (
        efficiency(batch, each) for each in (scale.safe_rows, scale.low, scale.high)
    )
    found = Learning(batch, scale, (value, low, high), _find_frontier(scale, report))
    if scale.high >= ENDLESS or own_batch is None or own_batch == batch or not report.own_rate:
        return found
    low, high = sorted(extra_rows(own_batch, batch, each) for each in (scale.low, scale.high))
    return msgspec.structs.replace(
        found,
        extra_samples=(extra_rows(own_batch, batch, scale.rows), low, high),
        relative_speed=chosen.throughput.value / report.own_rate,
    )


def _find_frontier(scale: NoiseScale, report: SearchReport) -> tuple[Point, ...]:
    """Return the measured batches that are faster than all smaller ones, in increasing order."""
    # each has two rates: its samples/s, and samples/s in very small batches that improve the model
    # equally fast
    chosen = report.chosen
    # the chosen layout has the same samples/s as in the verdict
    results = [chosen if result.layout == chosen.layout else result for result in report.results]
    shared = [result for result in results if result.layout.traits.by_shares]
    shared.sort(key=lambda one: (one.layout.global_batch, -one.throughput.value))
    frontier: list[Point] = []
    fastest = -math.inf
    for one in shared:
        size = one.layout.global_batch
        rate = one.throughput.value
        if rate > fastest:
            fastest = rate
            frontier.append((size, rate, rate * efficiency(size, scale.safe_rows)))
    return tuple(frontier)
