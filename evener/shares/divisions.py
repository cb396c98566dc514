"""Determine where to cut a batch for devices, and which gradients to sum together.

The global batch of a plan is cut exactly as planned, and a shorter last batch in the same
proportions. The number of rows may be a tensor, so that a TensorFlow graph can compute the cuts.
This module itself imports no framework.

Gradients are summed in two groups because of how TensorFlow schedules sums. It queues a step's
kernels long before the GPU runs them. A sum waits for all kernels queued before it, and sums run
one after another. So the first sum may overlap with the backward pass, but all later ones wait for
its end. A third sum would only prolong the time after the backward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

LARGEST_DENOMINATOR = 10_000  # for converting a ratio from a float to a fraction


class Cut:
    """Divides the rows of a batch among devices by weights.

    `floors` rounds all slices but the last down. `micros` are the rows per pass of each device,
    empty for one pass.
    """

    # A batch of sum(weights) rows is cut exactly by the weights. Slices are rounded down as in
    # Keras' former `multi_gpu_model`.

    def __init__(
        self, weights: Sequence[float], floors: bool = False, micros: Sequence[int] = ()
    ) -> None:
        self.weights: tuple[Any, ...] = _whole(weights)
        self.total: Any = sum(self.weights)
        self.floors = floors
        self.micros: tuple[Any, ...] = tuple(micros)

    @property
    def in_passes(self) -> bool:
        """True if devices compute their rows in passes."""
        return bool(self.micros)

    def passes(self, device: int, rows: Any) -> Any:
        """Return the number of passes in which a device computes `rows` rows."""
        return -(-rows // self.micros[device])

    def bounds(self, rows: Any) -> list[Any]:
        """Return the edges of the devices' slices, from 0 to `rows`, which may be a tensor."""
        if self.floors:
            parts = [rows * weight // self.total for weight in self.weights[:-1]]
            return [rows * 0, *accumulate(parts), rows]
        inner = [
            (2 * rows * edge + self.total) // (2 * self.total)
            for edge in accumulate(self.weights[:-1])
        ]
        return [rows * 0, *inner, rows]

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each device."""
        edges = self.bounds(rows)
        return tuple(stop - start for start, stop in pairwise(edges))


def _whole(weights: Sequence[float]) -> tuple[int, ...]:
    parts = [Fraction(weight).limit_denominator(LARGEST_DENOMINATOR) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    return tuple(int(part * scale) for part in parts)


LATE_PART = 0.25  # fraction of all bytes that may wait for the end of the backward pass
WORTH_BYTES = 8 << 20  # fewer bytes are summed at once, because a second sum would start too late


def divide_sums(tensors: Sequence[tuple[int, Hashable]], apart: int = 0) -> list[list[int]]:
    """Group tensors for all-reduce, and return the indices of each group.

    `tensors` are pairs of size in bytes and dtype, in the order in which they are computed. The
    last `apart` tensors are summed separately.
    """
    # Tensors of different types are never in the same group. If all tensors have less than 8 MiB in
    # total, each type has one group. Otherwise, each type has an early group, summed during the
    # backward pass, and a late one. The late groups have at most LATE_PART of all bytes, unless
    # they consist of a single larger tensor.
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
