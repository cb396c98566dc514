"""Timed steps as points of a curve, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from evener.balancer.search.model.step_time import Point
from evener.balancer.search.statistics import student
from evener.balancer.types import Observation, Timed

TYPICAL_BLOCKS = 8  # of a probe; turns the half-width of its interval into a standard error


def relative_error(seen: Timed) -> float:
    """Relative standard error of a step time, from its 95 % interval."""
    half = (seen.high_seconds - seen.low_seconds) / 2
    return half / seen.step_seconds / student(TYPICAL_BLOCKS - 1) if seen.step_seconds > 0 else 1.0


def read_points(seen: Sequence[Observation], position: int, own_part: bool = False) -> Iterator[Point]:
    """Whole steps, or the device's own part of them, with standard errors.

    Each error is the larger of its own error and the error expected from the pooled noise per step: an interval of few
    blocks is often too narrow by luck, and a probe that ends once it is narrow enough selects those.
    """
    found: list[tuple[Timed, float]] = []
    for one in seen:
        seconds = (one.device_seconds[position] if own_part else one.step_seconds) if isinstance(one, Timed) else None
        if isinstance(one, Timed) and seconds:
            found.append((one, seconds))
    own = [relative_error(one) for one, _ in found]
    steps = [max(1, one.steps) for one, _ in found]
    noise = math.sqrt(math.fsum(e * e * n for e, n in zip(own, steps, strict=True)) / max(1, len(own)))
    for (one, seconds), error, count in zip(found, own, steps, strict=True):
        layout = one.probe.layout
        wide = max(error, noise / math.sqrt(count))
        yield Point(layout.shares[position], seconds, wide, layout.passes(position))
