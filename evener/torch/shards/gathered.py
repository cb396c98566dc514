"""Memory for the gathered parameters of a unit, in the dtypes that the unit computes in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from .place import Parts, ShardRank
from .slot import Slot


def sort_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Return the parameters sorted by the size of the dtype they are gathered in, largest first."""
    # so the parameters of each dtype begin at a multiple of its size in bytes
    return sorted(slots, key=lambda slot: (-slot.computes.itemsize, str(slot.computes)))


class Segment:
    """Range of elements of a flat tensor that are gathered in the same dtype.

    `byte` is the offset of its first element in the gathered memory.
    """

    def __init__(self, dtype: torch.dtype, start: int, stop: int, byte: int) -> None:
        self.dtype, self.start, self.stop, self.byte = dtype, start, stop, byte

    def byte_of(self, element: int) -> int:
        """Return the offset in bytes of an element in the gathered memory."""
        return self.byte + (element - self.start) * int(self.dtype.itemsize)


class Gathered:
    """Block of memory for parameters that are gathered from the shards of all ranks.

    Arguments:

    - `place`: this rank, and the size of each rank's part.
    - `slots`: the parameters, in the order of `sort_slots`.
    - `ranges`: start and stop of each rank's elements.
    - `shard`: this rank's elements.
    """

    # each rank's part of the block is one range of bytes, whatever the dtypes

    def __init__(
        self,
        place: ShardRank,
        slots: Sequence[Slot],
        ranges: Sequence[tuple[int, int]],
        shard: torch.Tensor,
    ) -> None:
        self.segments = _make_segments(slots, ranges[-1][1])
        self.size = self._byte_of(ranges[-1][1])
        block = torch.empty(self.size, dtype=torch.uint8, device=place.device)
        self._storage = block.untyped_storage()
        self._typed = [
            block[segment.byte : segment.byte_of(segment.stop)].view(segment.dtype)
            for segment in self.segments
        ]
        self._is_single_rank = place.single_rank
        byte_ranges = [(self._byte_of(start), self._byte_of(stop)) for start, stop in ranges]
        # .data has its own version counter, so autograd accepts tensors that it saved in the
        # forward pass, even after the copies that gloo makes on a GPU during a wait
        self._parts = Parts(block.data, byte_ranges, place.rank, place.on_nccl)
        self._copies = self._pair_with(shard, *ranges[place.rank])

    def view_of(self, slot: Slot) -> torch.Tensor:
        """Return the parameter of `slot` as a view of the gathered memory."""
        for segment, typed in zip(self.segments, self._typed, strict=True):
            if segment.dtype == slot.computes:
                first = slot.start - segment.start
                return typed[first : first + slot.numel].view(slot.shape)
        raise KeyError(slot.computes)

    def gather(self) -> list[Any]:
        """Allocate the memory and start to gather into it; return the handles to wait for."""
        self._storage.resize_(self.size)
        for target, source in self._copies:  # neither is known to autograd
            target.copy_(source)
        return [] if self._is_single_rank else self._parts.gather()

    def free(self) -> None:
        """Free the memory. Views of it can be used again after the next gather."""
        self._storage.resize_(0)

    @property
    def has_memory(self) -> bool:
        """Whether the memory is allocated now."""
        return bool(self._storage.size())

    def _byte_of(self, element: int) -> int:
        segment = next((each for each in self.segments if element < each.stop), None)
        return (segment or self.segments[-1]).byte_of(element)

    def _pair_with(
        self, shard: torch.Tensor, start: int, stop: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """List the copies that write a shard to the gathered memory, as pairs (target, source).

        `shard` has the elements from `start` to `stop` - 1 of the flat tensor.
        """
        # a rank that is measured alone repeats its elements to fill each segment
        pairs = []
        for segment, typed in zip(self.segments, self._typed, strict=True):
            low, high = max(start, segment.start), min(stop, segment.stop)
            own = shard[low - start : high - start] if low < high else shard
            if self._is_single_rank:
                pairs += _repeat(typed.data, own)
            elif low < high:
                pairs.append((typed.data[low - segment.start : high - segment.start], own))
        return pairs


def _make_segments(slots: Sequence[Slot], elements: int) -> list[Segment]:
    """Return one range of elements for each dtype, with the padding in the last range."""
    made: list[Segment] = []
    byte = 0
    for dtype, same in groupby(slots, lambda slot: slot.computes):
        listed = list(same)
        made.append(Segment(dtype, listed[0].start, listed[-1].start + listed[-1].numel, byte))
        byte = made[-1].byte_of(made[-1].stop)
    # the last one includes the padding
    made[-1].stop = elements
    return made


def _repeat(target: torch.Tensor, own: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the copy operations that fill `target` with repetitions of `own`.

    Each is a pair: a slice of `target`, and the tensor to copy into it.
    """
    times, rest = divmod(target.numel(), own.numel())
    lines = target[: times * own.numel()].view(times, own.numel())
    return [(lines, own.expand(times, own.numel())), (target[times * own.numel() :], own[:rest])]
