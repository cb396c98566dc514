"""Round values for the ticks of charts, on the screen and in reports."""

from __future__ import annotations

import math

MOST_TICKS = 6


def round_ticks(high: float, max_ticks: int = MOST_TICKS) -> list[float]:
    """Return tick values from 0 to at most `high`, in steps of a round number.

    There are up to `max_ticks` of them besides 0.
    """
    if high <= 0:
        return [0.0]
    max_ticks = max(1, max_ticks)
    power = 10.0 ** math.floor(math.log10(high / max_ticks))
    for factor in (1, 2, 5, 10, 20):
        step = power * factor
        count = int(high / step + 1e-9)
        if count <= max_ticks:
            break
    return [step * number for number in range(count + 1)]


def round_log_ticks(low: float, high: float, max_ticks: int = MOST_TICKS) -> list[float]:
    """Return up to `max_ticks` round numbers from `low` to `high`, for a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for round_ in ((1, 2, 5), (1, 5), (1,)):
        ticks = [step * 10.0**power for power in powers for step in round_]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= max_ticks:
            return inside
    return inside[:: -(-len(inside) // max_ticks)]
