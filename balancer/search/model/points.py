"""Measured times of one device, each with its error, and their averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

SAME_BATCH = 0.02  # points nearer than this, relatively, are one point
LEAST_ERROR = 0.0005  # relative; no timing is believed to be better


class Point(msgspec.Struct, frozen=True):
    """One measured time; `error` is its relative standard error."""

    batch: int
    seconds: float
    error: float


def merged(points: Iterable[Point], within: float) -> list[Point]:
    """Points in rising batch; those whose batches are nearer than `within`, relatively, averaged by their errors."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: (p.batch, p.seconds, p.error)):
        if groups and point.batch <= groups[-1][0].batch * (1 + within):
            groups[-1].append(point)
        else:
            groups.append([point])
    return [_average(group) for group in groups]


def typical(points: Sequence[Point]) -> float:
    """The relative standard error of a point, in the root mean square."""
    return math.sqrt(math.fsum(p.error**2 for p in points) / len(points))


def _average(group: Sequence[Point]) -> Point:
    if len(group) == 1:
        return group[0]
    weights = [1 / max(p.error, LEAST_ERROR) ** 2 for p in group]
    total = math.fsum(weights)
    batch = round(math.fsum(w * p.batch for w, p in zip(weights, group, strict=True)) / total)
    rate = math.fsum(w * p.seconds / p.batch for w, p in zip(weights, group, strict=True)) / total
    return Point(batch, rate * batch, 1 / math.sqrt(total))
