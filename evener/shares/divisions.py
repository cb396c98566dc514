"""Decide where to cut a batch for the devices, and which gradients to sum together.

The global batch of a plan is cut exactly as planned, and a shorter last batch in the same
proportions. The number of rows may be a tensor, so that a TensorFlow graph can compute the cuts.
This module itself imports no framework.

Gradients are summed in two groups because of how TensorFlow schedules sums. It queues a step's
kernels long before the GPU runs them. A sum waits for all kernels that were queued before it, and
sums run one after another. So the first sum can overlap with the backward pass, but all later ones
wait for the end of the backward pass. A third sum would only make the time after it longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

LARGEST_DENOMINATOR = 10_000  # for converting a ratio from a float to a fraction


class Cut:
    """Divides the rows of a batch among devices in proportion to weights.

    `micros` are the rows per pass of each device, or empty if each takes one pass. By default, the
    points at which the batch is cut are rounded to the nearest row. With `rounds_down`, the slices
    are rounded down instead, and the last device gets the remaining rows.
    """

    # A batch of sum(weights) rows is cut exactly by the weights. Slices are rounded down as in
    # Keras' former `multi_gpu_model`.

    def __init__(
        self, weights: Sequence[float], rounds_down: bool = False, micros: Sequence[int] = ()
    ) -> None:
        self.weights: tuple[Any, ...] = _whole(weights)
        self.total: Any = sum(self.weights)
        self.floors = rounds_down
        self.micros: tuple[Any, ...] = tuple(micros)

    @property
    def in_passes(self) -> bool:
        """True if devices compute their rows in several passes."""
        return bool(self.micros)

    def passes(self, device: int, rows: Any) -> Any:
        """Return the number of passes that a device needs for `rows` rows."""
        return -(-rows // self.micros[device])

    def bounds(self, rows: Any) -> list[Any]:
        """Return the indices at which the devices' slices begin and end, from 0 to `rows`.

        `rows` may be a tensor.
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
        """Return how many rows each device gets."""
        edges = self.bounds(rows)
        return tuple(stop - start for start, stop in pairwise(edges))


def _whole(weights: Sequence[float]) -> tuple[int, ...]:
    parts = [Fraction(weight).limit_denominator(LARGEST_DENOMINATOR) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    return tuple(int(part * scale) for part in parts)


LATE_PART = 0.25  # fraction of all bytes that may wait for the end of the backward pass
WORTH_BYTES = 8 << 20  # fewer bytes are summed at once, because a second sum would start too late


def divide_sums(
    tensors: Sequence[tuple[int, Hashable]], separate_count: int = 0
) -> list[list[int]]:
    """Group tensors for all-reduce, and return the indices of the tensors in each group.

    `tensors` lists the size in bytes and the dtype of each tensor, in the order in which they are
    computed. The last `separate_count` tensors get groups of their own.
    """
    # Tensors of different types are never in the same group. If all tensors have less than 8 MiB in
    # total, each type has one group. Otherwise, each type has an early group, which is summed
    # during the backward pass, and a late one. The late groups have at most LATE_PART of all bytes,
    # unless they consist of a single larger tensor.
    sizes = [size for size, _ in tensors]
    left = sum(sizes)
    last = len(sizes) - separate_count - 1
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
