"""Where a batch of any size is cut for the devices: arithmetic that works on numbers and on tensors.

A plan says how its own global batch is cut; a shorter last batch is cut in the same proportions, inside the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

LARGEST_DENOMINATOR = 10_000  # of a ratio given as a float


class Cut:
    """Where a batch is cut for devices of these weights, in order; weights are whole samples or ratios above 0.

    `floors` cuts as `multi_gpu_model` did (each the floor of its part, the last takes the rest); otherwise the
    boundaries are rounded, so that a batch of sum(weights) rows is cut exactly by them.
    """

    def __init__(self, weights: Sequence[float], floors: bool = False) -> None:
        self.weights: tuple[Any, ...] = _whole(weights)
        self.total: Any = sum(self.weights)
        self.floors = floors

    def bounds(self, rows: Any) -> list[Any]:
        """The len(weights) + 1 boundaries of a batch of `rows` (an int, or an int64 scalar tensor)."""
        if self.floors:
            parts = [rows * weight // self.total for weight in self.weights[:-1]]
            return [rows * 0, *accumulate(parts), rows]
        inner = [(2 * rows * edge + self.total) // (2 * self.total) for edge in accumulate(self.weights[:-1])]
        return [rows * 0, *inner, rows]

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Samples of each device in a batch of `rows`."""
        edges = self.bounds(rows)
        return tuple(stop - start for start, stop in pairwise(edges))


def _whole(weights: Sequence[float]) -> tuple[int, ...]:
    parts = [Fraction(weight).limit_denominator(LARGEST_DENOMINATOR) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    return tuple(int(part * scale) for part in parts)
