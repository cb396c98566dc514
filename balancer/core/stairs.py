"""Stairs in a device's step time: whether a few points show that it comes in multiples of one height, and of which."""

from __future__ import annotations

import math
from collections.abc import Sequence

Seen = tuple[int, float, float]  # batch, seconds, relative error

MOST_STEPS = 40  # the largest time in step heights: finer stairs are no matter
FEWEST_POINTS = 4
TIGHTER = 0.12  # the points must lie so near to whole multiples, in step heights (0.25 is what chance gives)
WITHIN = 3.0  # errors that a point may be off its step


def step_height(points: Sequence[Seen]) -> tuple[float, tuple[float, float]]:
    """The height in seconds, 0 if the points show none, and (fixed, slope) of the line that is rounded up to it."""
    if len(points) < FEWEST_POINTS:
        return 0.0, (0.0, 0.0)
    top = max(seconds for _, seconds, _ in points)
    for steps in range(2, MOST_STEPS + 1):  # the highest stairs that fit: finer ones fit anything
        if (height := _refined(points, top / steps)) and (line := under(points, height)):
            return height, line
    return 0.0, (0.0, 0.0)


def _refined(points: Sequence[Seen], height: float) -> float:
    """The height nearby that fits the whole multiples best; 0 if none does."""
    counts = [max(1, round(seconds / height)) for _, seconds, _ in points]
    weights = [1 / (max(error, 5e-4) * seconds) ** 2 for _, seconds, error in points]
    above = math.fsum(w * n * p[1] for w, n, p in zip(weights, counts, points, strict=True))
    height = above / math.fsum(w * n * n for w, n in zip(weights, counts, strict=True))
    for n, (_, seconds, error) in zip(counts, points, strict=True):
        gap = abs(seconds - n * height)
        if gap > WITHIN * max(error, 5e-4) * seconds or gap > TIGHTER * height:
            return 0.0
    return height


def under(points: Sequence[Seen], height: float) -> tuple[float, float] | None:
    """The middle of the rising lines (fixed, slope) that pass within one step below every point; None without any."""
    bands = [((round(s / height) - 1) * height, round(s / height) * height, b) for b, s, _ in points]
    corners = []
    edges = [(b, t) for low, high, b in bands for t in (low, high)]
    for i, (b0, t0) in enumerate(edges):
        for b1, t1 in edges[i + 1 :]:
            if b0 == b1:
                continue
            slope = (t1 - t0) / (b1 - b0)
            fixed = t0 - slope * b0
            slack = 1e-9 * height
            if slope >= 0 and all(low - slack <= fixed + slope * b <= high + slack for low, high, b in bands):
                corners.append((fixed, slope))
    if not corners:
        return None
    return sum(c[0] for c in corners) / len(corners), sum(c[1] for c in corners) / len(corners)
