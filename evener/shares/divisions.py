"""Arithmetic that needs no framework: where a batch is cut for devices, and which gradients are
summed together.

A plan says how its own global batch is cut; a shorter last batch is cut in the same proportions,
inside the graph. TensorFlow queues a step's kernels long before its GPU computes them, and a sum
waits for all that is queued when it starts. Sums run one after another, so the first may run behind
the backward pass, and all that come after it wait for its end: more than two sums of a step would
hide less.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

LARGEST_DENOMINATOR = 10_000  # of a ratio given as a float


class Cut:
    """A cut of batches for devices of these weights, in order; weights are whole samples or ratios
    above 0.

    `floors` cuts as `multi_gpu_model` did (each the floor of its part, the last takes the rest);
    otherwise the boundaries are rounded, so that a batch of sum(weights) rows is cut exactly by
    them. `micros` are the most rows that each device takes in one pass; without them, it takes all
    of its rows in one.
    """

    def __init__(
        self, weights: Sequence[float], floors: bool = False, micros: Sequence[int] = ()
    ) -> None:
        self.weights: tuple[Any, ...] = _whole(weights)
        self.total: Any = sum(self.weights)
        self.floors = floors
        self.micros: tuple[Any, ...] = tuple(micros)

    @property
    def in_passes(self) -> bool:
        """True if a device may need more than one pass."""
        return bool(self.micros)

    def passes(self, device: int, rows: Any) -> Any:
        """The passes that a device takes for `rows` rows (an int, or an int64 scalar tensor), none
        for 0.
        """
        return -(-rows // self.micros[device])

    def bounds(self, rows: Any) -> list[Any]:
        """The len(weights) + 1 boundaries of a batch of `rows` (an int, or an int64 scalar
        tensor).
        """
        if self.floors:
            parts = [rows * weight // self.total for weight in self.weights[:-1]]
            return [rows * 0, *accumulate(parts), rows]
        inner = [
            (2 * rows * edge + self.total) // (2 * self.total)
            for edge in accumulate(self.weights[:-1])
        ]
        return [rows * 0, *inner, rows]

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Samples of each device in a batch of `rows`."""
        edges = self.bounds(rows)
        return tuple(stop - start for start, stop in pairwise(edges))


def _whole(weights: Sequence[float]) -> tuple[int, ...]:
    parts = [Fraction(weight).limit_denominator(LARGEST_DENOMINATOR) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    return tuple(int(part * scale) for part in parts)


LATE_PART = 0.25  # of all bytes, that may wait for the end of the backward pass
WORTH_BYTES = 8 << 20  # less is summed at once, sooner than another sum would start


def divide_sums(tensors: Sequence[tuple[int, Hashable]], apart: int = 0) -> list[list[int]]:
    """Places of tensors (bytes, type) that are summed together; given, and returned, in the order
    of being ready.

    Few bytes are one sum of each type. More bytes are two, of which the second has at most
    LATE_PART, or only the last tensor; the last `apart` tensors are left out of both and summed at
    the end.
    """
    sizes = [size for size, _ in tensors]
    left = sum(sizes)
    last = len(sizes) - apart - 1
    most_late = LATE_PART * left if left >= WORTH_BYTES else None
    sums: dict[tuple[int, Hashable], list[int]] = {}
    for place, (size, kind) in enumerate(tensors):
        if most_late is None:
            turn = 0
        elif place > last:
            turn = 2
        else:
            turn = int(place == last or left <= most_late)
        sums.setdefault((turn, kind), []).append(place)
        left -= size
    return list(sums.values())
