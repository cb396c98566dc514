"""Divide a tensor among ranks in unequal parts, and run collectives over them."""

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
    """A rank's device, and how the model is divided among the ranks.

    - `parts`: relative sizes of the ranks' parts of the state.
    - `single_rank`: True if the rank is measured without others. It then fills gathered parameters
      with copies of its own shard, and sums no gradients.
    - `first`: the first rank that computes rows; its buffers are copied to all ranks.
    """

    rank: int
    parts: tuple[float, ...]
    device: Any
    single_rank: bool = False
    first: int = 0

    @property
    def on_nccl(self) -> bool:
        """True if NCCL is the backend for collectives on this device."""
        return not self.single_rank and backend_name(dist.group.WORLD, self.device) == "nccl"

    @property
    def exchanges_bytes(self) -> bool:
        """True if ranks can exchange parts of unequal sizes in one collective."""
        # gloo can't do so between GPUs
        return not self.single_rank and (self.on_nccl or self.device.type == "cpu")


# elements to whose multiples flats are cut, so that each rank's part is aligned to 16 bytes also in
# half precision; collectives are slower otherwise
ALIGNED = 8


def cut(elements: int, parts: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Return each rank's (start, stop) range of a flat tensor's elements.

    The ranges are in proportion to `parts`, begin at multiples of ALIGNED, and include padding at
    the end. Equal parts get equal sizes. Each rank holds at least ALIGNED elements.
    """
    ranks = len(parts)
    blocks = -(-max(elements, 1) // (ALIGNED * ranks)) * ranks
    return tuple(
        (start * ALIGNED, stop * ALIGNED) for start, stop in bounds(apportion(blocks, parts))
    )


class Parts:
    """The ranks' parts of one tensor, and the collectives over them.

    The parts may differ in size.

    - `whole`: the tensor.
    - `ranges`: the (start, stop) range of each rank's part.
    - `rank`: this rank.
    - `on_nccl`: True if NCCL is the backend.
    """

    def __init__(
        self, whole: torch.Tensor, ranges: Sequence[tuple[int, int]], rank: int, on_nccl: bool
    ) -> None:
        self._whole, self._rank, self._on_nccl = whole, rank, on_nccl
        self._parts = [whole[start:stop] for start, stop in ranges]
        self._is_even = len({len(part) for part in self._parts}) == 1
        # how many collectives a gather or a reduction starts depends on these
        self._kind = (on_nccl, self._is_even, len([part for part in self._parts if len(part)]))
        self.own = self._parts[rank]

    def gather(self) -> list[Any]:
        """Start to fill the tensor from all ranks' parts; return the work handles to wait for."""
        return run_own(("gather", *self._kind), self._gather)

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
        """Start to sum the ranks' tensors; return the work handles to wait for.

        Each rank receives the sum of its own part.
        """
        return run_own(("reduce", *self._kind), self._reduce)

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
