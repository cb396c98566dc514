"""Divide a flat tensor among ranks in unequal parts, and run collectives on the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...shares.whole_rows import apportion, bounds
from ..private import backend_name
from ..sums.collectives import run_own


class ShardRank(msgspec.Struct, frozen=True):
    """This rank, and the relative size of each rank's part of a sharded model.

    - `rank`: index of this rank.
    - `parts`: relative size of each rank's part.
    - `device`: the device of the parameters.
    - `single_rank`: whether a rank is measured on its own, without collectives.
    - `first`: the rank that broadcasts buffers.
    """

    rank: int
    parts: tuple[float, ...]
    device: Any
    single_rank: bool = False
    first: int = 0

    @property
    def on_nccl(self) -> bool:
        """Whether collectives on the device use NCCL."""
        return not self.single_rank and backend_name(dist.group.WORLD, self.device) == "nccl"

    @property
    def exchanges_bytes(self) -> bool:
        """Whether the device's backend supports `all_to_all_single`."""
        # gloo can't do so between GPUs
        return not self.single_rank and (self.on_nccl or self.device.type == "cpu")


# elements to whose multiples flats are cut, so that each rank's part is aligned to 16 bytes also in
# half precision; collectives are slower otherwise
ALIGNED = 8


def cut(elements: int, parts: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Divide elements among ranks in proportion to `parts`, and return each rank's start and stop.

    Boundaries are multiples of ALIGNED elements, so the last stop may be above `elements`.
    """
    ranks = len(parts)
    blocks = -(-max(elements, 1) // (ALIGNED * ranks)) * ranks
    return tuple(
        (start * ALIGNED, stop * ALIGNED) for start, stop in bounds(apportion(blocks, parts))
    )


class Parts:
    """A flat tensor divided into unequal parts, one per rank, with collectives on the parts.

    Arguments:

    - `whole`: the tensor, padded to the end of the last range.
    - `ranges`: start and stop of each rank's elements.
    - `rank`: this rank.
    - `on_nccl`: whether collectives use NCCL.
    """

    def __init__(
        self, whole: torch.Tensor, ranges: Sequence[tuple[int, int]], rank: int, on_nccl: bool
    ) -> None:
        self._whole, self._rank, self._on_nccl = whole, rank, on_nccl
        self._parts = [whole[start:stop] for start, stop in ranges]
        self._is_even = len({len(part) for part in self._parts}) == 1
        # how many collectives a gather or a reduction starts depends on these
        self._variant = (on_nccl, self._is_even, len([part for part in self._parts if len(part)]))
        self.own = self._parts[rank]

    def gather(self) -> list[Any]:
        """Start to fill the tensor with the parts of all ranks; return the handles to wait for."""
        return run_own(("gather", *self._variant), self._gather)

    def _gather(self) -> list[Any]:
        if not self._on_nccl:
            return [
                dist.broadcast(part, rank, async_op=True)
                for rank, part in enumerate(self._parts)
                if len(part)
            ]
        if self._is_even:
            return [dist.all_gather_into_tensor(self._whole, self.own, async_op=True)]
        return [dist.all_gather(self._parts, self.own, async_op=True)]

    def reduce(self) -> list[Any]:
        """Start to sum the tensor over all ranks; return the handles to wait for.

        Each rank receives only the sum of its own part.
        """
        return run_own(("reduce", *self._variant), self._reduce)

    def _reduce(self) -> list[Any]:
        if not self._on_nccl:
            return [
                dist.reduce(part, rank, async_op=True)
                for rank, part in enumerate(self._parts)
                if len(part)
            ]
        if self._is_even:
            return [dist.reduce_scatter_tensor(self.own, self._whole, async_op=True)]
        return [dist.reduce_scatter(self.own, self._parts, async_op=True)]
