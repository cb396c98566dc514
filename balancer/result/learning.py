"""The cost of a free batch in learning, beside its samples/s, by the noise scale of a training
where there is one.
"""

from __future__ import annotations

import msgspec

from evener.training.noise_scale import ENDLESS, NoiseScale, extra_rows, rate_gain, worth

from ..request import Request
from ..search.report import SearchReport
from ..verdict import Learning

Point = tuple[
    int, float, float
]  # global batch, samples/s, samples/s in small batches that learn as fast


def find_learning(request: Request, report: SearchReport) -> Learning | None:
    """What a plan's batch is worth in learning, and its learning rate; None where neither the noise
    scale nor the script's own batch is known.
    """
    layout, scale, own = report.chosen.layout, request.noise_scale, request.own_batch
    batch = layout.global_batch
    if not layout.traits.by_shares:
        return None
    found = Learning(batch)
    if scale is not None and request.global_batch is None:
        found = _find_worth(scale, own, report)
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


def _find_worth(scale: NoiseScale, own: int | None, report: SearchReport) -> Learning:
    """What the chosen batch is worth, against the script's `own` where that is known, with the
    measured batches.
    """
    chosen = report.chosen
    batch, frontier = chosen.layout.global_batch, list[Point]()
    results = [
        chosen if one.layout == chosen.layout else one for one in report.results
    ]  # one figure for a layout
    for one in sorted(results, key=lambda one: (one.layout.global_batch, -one.throughput.value)):
        size, rate = one.layout.global_batch, one.throughput.value
        if one.layout.traits.by_shares and (not frontier or rate > frontier[-1][1]):
            frontier.append((size, rate, rate * worth(size, scale.safe_rows)))
    value, low, high = (worth(batch, each) for each in (scale.safe_rows, scale.low, scale.high))
    found = Learning(batch, scale, (value, low, high), tuple(frontier))
    if scale.high >= ENDLESS or own is None or own == batch or not report.own_rate:
        return found
    low, high = sorted(extra_rows(own, batch, each) for each in (scale.low, scale.high))
    return msgspec.structs.replace(
        found,
        extra=(extra_rows(own, batch, scale.rows), low, high),
        speed=chosen.throughput.value / report.own_rate,
    )
