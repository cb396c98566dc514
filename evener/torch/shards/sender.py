"""Sum half-precision gradients over ranks without sending them in float32.

Each rank sends its gradients to the ranks that store their shards, in the dtype in which they were
computed. The receiving rank multiplies them by the sender's weight, and adds them up in the dtype
of its shard. The result equals a reduction in the shard's dtype, but bfloat16 gradients of float32
parameters need only half the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..private import copy_each
from ..sums.collectives import run_own
from .gathered import Segment
from .place import ShardRank
from .slot import Slot

# maximum size of the received gradients on the rank with the largest shard, relative to the whole
# flat's; above it, a reduction in float32 needs less memory than one in half precision
MOST_RECEIVED = 2.0
ALIGNMENT = 16  # bytes; the part of each rank begins at a multiple
HEADER = 16  # bytes before each part, for the sender's weight


class DtypeRange(NamedTuple):
    """Range of elements of a flat tensor that have the same dtype and belong to the same rank.

    `start` and `stop` are indices of elements in the flat tensor. `byte` is the offset of the first
    element in the memory of the rank's part.
    """

    dtype: torch.dtype
    start: int
    stop: int
    byte: int

    def find_in(self, part: torch.Tensor) -> torch.Tensor:
        """Return the elements of this range as a view of `part`, a tensor of bytes."""
        size = (self.stop - self.start) * int(self.dtype.itemsize)
        return part[self.byte : self.byte + size].view(self.dtype)


class GradientCopy(NamedTuple):
    """Where to copy a parameter's gradient, or a slice of it, in the send buffer.

    - `position`: index of the parameter.
    - `elements`: the slice of the gradient to copy, or None for all of it.
    - `target`: the tensor to copy to, a part of the send buffer.
    """

    position: int
    elements: slice | None
    target: torch.Tensor


class GradientSender:
    """Sends gradients of a flat tensor to the ranks that store their shards, by an all-to-all.

    Arguments:

    - `place`: this rank, and the size of each rank's part.
    - `slots`: the parameters.
    - `segments`: the ranges of elements with the same dtype.
    - `ranges`: start and stop of each rank's elements.
    - `dtype`: dtype of the shards, in which gradients are added up.
    """

    def __init__(
        self,
        place: ShardRank,
        slots: Sequence[Slot],
        segments: Sequence[Segment],
        ranges: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        self._rank, self._start = place.rank, ranges[place.rank][0]
        self._weight = 1.0
        self._weights = torch.ones(1, dtype=dtype, device=place.device)  # the weight on the device
        pieces = [_divide(segments, start, stop) for start, stop in ranges]
        sizes = [_round_up(each[-1].byte + _byte_count(each[-1])) for each in pieces]
        others = [rank for rank in range(len(ranges)) if rank != self._rank]
        self._allocate(sizes, others, place.device)
        parts = self._split_by_ranks(sizes, others)
        found = [
            copy for i, slot in enumerate(slots) for copy in _find_copies(i, slot, pieces, parts)
        ]
        # by dtype, because a single kernel copies tensors of one dtype
        self._copies: dict[torch.dtype, list[GradientCopy]] = {dtype: []}
        for copy in found:
            self._copies.setdefault(copy.target.dtype, []).append(copy)
        self._headers = [_weight_of(parts[rank], dtype) for rank in others]
        self._dtype = dtype
        arrived = self._received.split(sizes[self._rank])
        own = pieces[self._rank]
        self._own = [(piece, piece.find_in(parts[self._rank])) for piece in own]
        self._theirs = [
            [(piece.find_in(part), _weight_of(part, dtype)) for part in arrived] for piece in own
        ]
        self.free()

    def _allocate(self, sizes: Sequence[int], others: Sequence[int], device: Any) -> None:
        """Allocate the buffers for sent and received gradients.

        `sizes` are the bytes of each rank's part, and `others` are the other ranks.
        """
        own = sizes[self._rank]
        self._sizes = [size if rank in others else 0 for rank, size in enumerate(sizes)]
        self._returned = [own if rank in others else 0 for rank in range(len(sizes))]
        self._sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._received = self._sent.new_empty(len(others) * own)
        self._for_others = self._sent[: sum(self._sizes)]
        self.taken_bytes, self.received_bytes = len(self._sent), len(self._received)

    def _split_by_ranks(
        self, sizes: Sequence[int], others: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """Divide the send buffer, and return the part for each rank.

        `sizes` are the bytes of each part, and `others` are the other ranks. This rank's own part
        isn't sent.
        """
        # the parts of `others` come first
        order = [*others, self._rank]
        parts = self._sent.split([sizes[rank] for rank in order])
        return dict(zip(order, parts, strict=True))

    def take(self, weight: float, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy this rank's weight and gradients to the send buffer; None is sent as zeros."""
        if weight != self._weight:
            self._weight = weight
            self._weights.fill_(weight)
        self._sent.untyped_storage().resize_(len(self._sent))
        if weight == 0.0:  # gradients may be infinite, and 0 times that is NaN
            self._sent.zero_()
            return
        for dtype, copies in self._copies.items():
            self._fill(dtype, copies, gradients)

    def send(self) -> list[Any]:
        """Start to exchange gradients with the other ranks; return the handles to wait for."""
        self._received.untyped_storage().resize_(len(self._received))
        return [run_own("exchange", self._exchange)]

    def _exchange(self) -> Any:
        return dist.all_to_all_single(
            self._received, self._for_others, self._returned, self._sizes, async_op=True
        )

    def _fill(
        self,
        dtype: torch.dtype,
        copies: Sequence[GradientCopy],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Copy all gradients of one dtype to the send buffer; None is sent as zeros."""
        targets, sources = [], []
        for position, elements, target in copies:
            gradient = gradients[position]
            if gradient is None:
                target.zero_()
                continue
            targets.append(target)
            sources.append(gradient if elements is None else gradient.reshape(-1)[elements])
        # the header of each part has this rank's weight, in the dtype of the shards
        if dtype == self._dtype:
            targets += self._headers
            sources += [self._weights] * len(self._headers)
        if targets:
            copy_each(targets, sources)

    def add_up(self, total: torch.Tensor) -> None:
        """Write the weighted sum of all ranks' gradients to `total`, and free the memory.

        Call this after the exchange that `send` started has ended.
        """
        for (piece, own), theirs in zip(self._own, self._theirs, strict=True):
            part = total[piece.start - self._start : piece.stop - self._start]
            if self._weight == 1.0:
                part.copy_(own)
            else:  # in the dtype of the shards, because the weight isn't a scalar
                torch.mul(own, self._weights, out=part)
            for gradients, weight in theirs:
                part.addcmul_(gradients, weight)
        self.free()

    def free(self) -> None:
        """Free the memory of sent and received gradients."""
        self._sent.untyped_storage().resize_(0)
        self._received.untyped_storage().resize_(0)


def bound_received(ranks: int) -> float:
    """Return an upper bound for the bytes of gradients that a rank receives from the other ranks.

    It is relative to the flat tensor: 1.0 means as many bytes as the whole tensor has. `ranks` is
    the number of ranks.
    """
    return min(MOST_RECEIVED, ranks - 1.0)


def saves_memory(ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether a GradientSender needs less memory than a reduction in float32.

    It needs more if a rank receives too many gradients from the others. `ranges` has the start and
    stop of each rank's elements.
    """
    # a rank receives the gradients of its range from each other rank
    largest = max(stop - start for start, stop in ranges)
    return (len(ranges) - 1) * largest <= MOST_RECEIVED * ranges[-1][1]


def _divide(segments: Sequence[Segment], start: int, stop: int) -> list[DtypeRange]:
    """Divide a rank's part of the flat tensor into one range of elements for each dtype.

    The part has the elements from `start` to `stop` - 1.
    """
    pieces: list[DtypeRange] = []
    byte = HEADER
    for segment in segments:  # the widest dtypes come first, so each piece is aligned
        low, high = max(start, segment.start), min(stop, segment.stop)
        if low < high:
            pieces.append(DtypeRange(segment.dtype, low, high, byte))
            byte += _byte_count(pieces[-1])
    return pieces


def _find_copies(
    position: int,
    slot: Slot,
    pieces: Sequence[Sequence[DtypeRange]],
    parts: dict[int, torch.Tensor],
) -> list[GradientCopy]:
    """Return where to copy a parameter's gradient, or slices of it, in the send buffer.

    `position` is the parameter's index in the list of slots, `pieces` has the dtype ranges of each
    rank's part, and `parts` has the memory of each part, by rank.
    """
    found = []
    for rank, listed in enumerate(pieces):
        for piece in listed:
            low, high = max(slot.start, piece.start), min(slot.start + slot.numel, piece.stop)
            if low >= high:
                continue
            target = piece.find_in(parts[rank])[low - piece.start : high - piece.start]
            if high - low == slot.numel:
                found.append(GradientCopy(position, None, target.view(slot.shape)))
            else:
                elements = slice(low - slot.start, high - slot.start)
                found.append(GradientCopy(position, elements, target))
    return found


def _weight_of(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part[: dtype.itemsize].view(dtype)


def _byte_count(piece: DtypeRange) -> int:
    return (piece.stop - piece.start) * int(piece.dtype.itemsize)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
