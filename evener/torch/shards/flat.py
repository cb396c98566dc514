"""A flat: one tensor with several parameters, whole while they are used and otherwise sharded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...shares.whole_rows import apportion, bounds
from ..packed import is_packed
from ..private import backend_name, own_parameters
from ..sums.collectives import own_collectives


class ShardRank(msgspec.Struct, frozen=True):
    """A rank's device, and how the model is divided among the ranks.

    `parts` are the relative sizes of the state that each rank holds. With `single_rank`, the rank
    is measured without other ranks: it fills gathered parameters with copies of its own shard, and
    reduces its gradients with no other rank. `first` is the first rank that computes rows.
    """

    rank: int
    parts: tuple[float, ...]
    device: Any
    single_rank: bool = False
    first: int = 0

    @property
    def on_nccl(self) -> bool:
        """True if NCCL is the backend for collectives on this device."""
        return backend_name(dist.group.WORLD, self.device) == "nccl"


def cut(elements: int, parts: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Return each rank's (start, stop) range of a flat, in proportion to `parts`.

    The flat may be padded, so that each rank holds at least one element.
    """
    ranks = len(parts)
    return bounds(apportion(-(-max(elements, 1) // ranks) * ranks, parts))


class Slot:
    """A parameter: its names in the model, its whole tensor in a flat, and this rank's piece."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.shape = tensor, tensor.shape  # the original parameter, until it is cut
        self.names: list[str] = []
        # modules that have the parameter, and its name in each
        self.owners: list[tuple[Any, str]] = []
        self.units: set[str] = set()
        self.start = 0  # its first element in the flat
        # a one-dimensional Parameter that the optimizer trains; it may be empty
        self.piece: Any = None
        self.whole: Any = None  # a Parameter without memory unless its unit is gathered
        self.view: Any = None  # this rank's piece of the gradient
        self.fired = False  # True if a gradient was computed since the last reduction
        self.kept = -1  # the version of the piece's gradient while gradients wait for a reduction
        # a reduction completed in this backward pass; the piece had a gradient before
        self.received = self.before = False

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return int(self.shape.numel())

    def is_kept(self) -> bool:
        """True if the piece's gradient hasn't been cleared or changed since `keep` saved it."""
        gradient = self.piece.grad
        return gradient is not None and gradient._version == self.kept

    def point_to(self, parameter: Any) -> None:
        """Make `parameter` the parameter of the modules that own this slot."""
        for module, name in self.owners:
            if isinstance(module, torch.nn.RNNBase):
                setattr(module, name, parameter)  # an RNN keeps a list of its parameters
            else:
                own_parameters(module)[name] = parameter


class Flat:
    """The parameters of one dtype in a unit, in one tensor; the ledger `held` counts its bytes."""

    def __init__(self, place: ShardRank, slots: Sequence[Slot], dtype: Any, held: Any) -> None:
        first = slots[0].tensor
        self.slots, self.trainable, self.held, self._place = slots, first.requires_grad, held, place
        self.packed = is_packed(first)
        self.elements = 0
        for slot in slots:
            slot.start = self.elements
            self.elements += slot.numel
        self.cuts = cut(self.elements, place.parts)
        self.rank = place.rank
        self.start, self.stop = self.cuts[place.rank]
        length = self.cuts[-1][1]
        filled = torch.zeros(length, dtype=first.dtype, device=place.device)
        if first.device.type != "meta":
            self._copy_whole(filled)
        self.shard = filled[self.start : self.stop].clone()
        self.dtype = dtype if dtype is not None and first.is_floating_point() else first.dtype
        self.whole = filled if self.dtype == first.dtype else filled.to(self.dtype)
        self._grads: torch.Tensor | None = None  # gradients of all parameters for this rank's rows
        self._grad_shard: torch.Tensor | None = None
        self._work: list[Any] = []
        for slot in slots:
            low, high = self.range_of(slot)
            whole = self.whole[slot.start : slot.start + slot.numel].view(slot.shape)
            if self.packed:
                slot.whole = slot.tensor  # it holds the statistics with which its layer unpacks it
                slot.whole.data = whole
            else:
                slot.whole = torch.nn.Parameter(whole, requires_grad=self.trainable)
            slot.piece = torch.nn.Parameter(self.shard[low:high], requires_grad=self.trainable)
            slot.point_to(slot.piece)
            slot.tensor = None
        held.add("shards", byte_count(self.shard))
        self.whole.untyped_storage().resize_(0)

    def _copy_whole(self, filled: torch.Tensor) -> None:
        with torch.no_grad():
            for slot in self.slots:
                filled[slot.start : slot.start + slot.numel].copy_(slot.tensor.detach().reshape(-1))
        if self._place.single_rank:
            return
        with own_collectives():
            dist.broadcast(filled, 0)

    def range_of(self, slot: Slot) -> tuple[int, int]:
        """Return the range of this rank's shard that belongs to a parameter."""
        low, high = max(slot.start, self.start), min(slot.start + slot.numel, self.stop)
        return (low - self.start, high - self.start) if low < high else (0, 0)

    # ------------------------------------------------------------------ whole parameters

    def gather(self) -> list[Any]:
        """Start to gather the whole parameters; return the work handles to wait for."""
        self.whole.untyped_storage().resize_(byte_count(self.whole))
        self.held.add("gathered", byte_count(self.whole))
        # .data has its own version counter, so autograd accepts tensors that it saved in the
        # forward pass, even after the copies that gloo makes on a GPU during a wait
        with torch.no_grad():
            return self.collect(self.whole.data, self.shard)

    def collect(self, whole: torch.Tensor, shard: torch.Tensor) -> list[Any]:
        """Start to fill `whole` with the ranks' shards; return the work handles to wait for."""
        if self._place.single_rank:
            size = shard.numel()
            times, rest = divmod(whole.numel(), size)
            whole[: times * size].view(times, size).copy_(shard.expand(times, size))
            whole[times * size :].copy_(shard[:rest])
            return []
        own = whole[self.start : self.stop]
        own.copy_(shard)
        with own_collectives():
            if not self._place.on_nccl:
                return [
                    dist.broadcast(whole[a:b], i, async_op=True)
                    for i, (a, b) in enumerate(self.cuts)
                    if a < b
                ]
            if self._is_even():
                return [dist.all_gather_into_tensor(whole, own, async_op=True)]
            return [dist.all_gather([whole[a:b] for a, b in self.cuts], own, async_op=True)]

    def _is_even(self) -> bool:
        return len({stop - start for start, stop in self.cuts}) == 1

    def free(self) -> None:
        """Free the memory of the whole parameters."""
        self.held.add("gathered", -byte_count(self.whole))
        self.whole.untyped_storage().resize_(0)

    # ------------------------------------------------------------------ gradients

    def _open(self) -> torch.Tensor:
        """Return the buffer in which this rank's gradients of the whole flat accumulate.

        Waits first for a reduction that an earlier use of the unit started.
        """
        self.receive()
        if self._grads is None:
            self._grads = torch.zeros(
                self.cuts[-1][1], dtype=self.shard.dtype, device=self.shard.device
            )
            self.held.add("gathered", byte_count(self._grads))
        return self._grads

    def take(self, slot: Slot, weight: float) -> None:
        """Move the gradient of a whole parameter, times `weight`, to the flat's buffer."""
        gradients = self._open()
        gradient, slot.whole.grad = slot.whole.grad, None
        if weight:  # otherwise it may be infinite
            with torch.no_grad():
                gradients[slot.start : slot.start + slot.numel].add_(
                    gradient.reshape(-1), alpha=weight
                )
        slot.fired = True

    def keep(self) -> None:
        """Save the accumulated gradients for a later reduction.

        The `.grad` of each piece is set meanwhile, so that zero_grad() is detected.
        """
        taken = [slot for slot in self.slots if slot.fired]
        for slot in taken:
            if slot.piece.grad is None:
                self._make_views()
                slot.piece.grad = slot.view.zero_()
        for slot in taken:  # views of one tensor share a version
            slot.kept = slot.piece.grad._version

    def send(self, weight: float) -> None:
        """Start to reduce the gradients over the ranks, with this rank's times `weight`.

        Each rank receives the sums for its own shard.
        """
        gradients = self._open()
        with torch.no_grad(), own_collectives():
            if weight == 0.0:
                gradients.zero_()  # keeps infinities out
            elif weight != 1.0:
                gradients.mul_(weight)
            parts = [gradients[a:b] for a, b in self.cuts]
            if self._place.single_rank:
                self._work = [_ALONE]
            elif not self._place.on_nccl:
                self._work = [
                    dist.reduce(part, i, async_op=True) for i, part in enumerate(parts) if len(part)
                ]
            elif self._is_even():
                self._work = [
                    dist.reduce_scatter_tensor(parts[self._place.rank], gradients, async_op=True)
                ]
            else:
                self._work = [dist.reduce_scatter(parts[self._place.rank], parts, async_op=True)]

    def receive(self) -> None:
        """Wait for a running reduction, if any, and accumulate its result."""
        if not self._work:
            return
        for work in self._work:
            work.wait()
        assert self._grads is not None
        with torch.no_grad():
            self._add(self._grads[self.start : self.stop])
        self.held.add("gathered", -byte_count(self._grads))
        self._work, self._grads = [], None

    def release_gradients(self) -> None:
        """Free the memory of this rank's gradients if all of them were cleared.

        The next backward pass allocates it again. Therefore no gradients are in memory while
        activations reach their peak, as in training on one device.
        """
        if self._grad_shard is None or any(slot.piece.grad is not None for slot in self.slots):
            return
        self.held.add("gradients", -byte_count(self._grad_shard))
        self._grad_shard = None
        for slot in self.slots:
            slot.view = None

    def _make_views(self) -> torch.Tensor:
        """Return the gradient of this rank's shard.

        It is allocated first if necessary, and each slot gets its view of it.
        """
        if self._grad_shard is None:
            self._grad_shard = torch.zeros_like(self.shard)
            self.held.add("gradients", byte_count(self._grad_shard))
            for slot in self.slots:
                low, high = self.range_of(slot)
                slot.view = self._grad_shard[low:high]
        return self._grad_shard

    def _add(self, summed: torch.Tensor) -> None:
        shard = self._make_views()
        fresh = [
            slot for slot in self.slots if not slot.received and slot.piece.grad is not slot.view
        ]
        if len(fresh) == len(self.slots) and all(slot.piece.grad is None for slot in fresh):
            shard.copy_(summed)
        else:
            for slot in fresh:
                slot.view.zero_() if slot.piece.grad is None else slot.view.copy_(slot.piece.grad)
            shard.add_(summed)
        for slot in self.slots:
            if not slot.received:
                slot.received, slot.before, slot.piece.grad = (
                    True,
                    slot.piece.grad is not None,
                    None,
                )

    def forget(self) -> None:
        """Drop accumulated gradients, and the gradients of a backward pass that failed."""
        for work in self._work:
            work.wait()
        if self._grads is not None:
            self.held.add("gathered", -byte_count(self._grads))
        self._work, self._grads = [], None
        for slot in self.slots:
            slot.received = slot.before = slot.fired = False
            slot.piece.grad = None

    def settle(self, used: Sequence[bool]) -> None:
        """Set the `.grad` of each piece after a backward pass if any rank used its parameter."""
        for slot, is_used in zip(self.slots, used, strict=True):
            if not slot.received:
                continue
            if slot.piece.grad is not None:  # from a loss on the parameters themselves
                slot.view.add_(slot.piece.grad)
            if is_used or slot.before or slot.piece.grad is not None:
                slot.piece.grad = slot.view
            slot.received = slot.before = slot.fired = False


_ALONE = SimpleNamespace(wait=lambda: None)  # the work handle of a sum on one rank


def byte_count(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())
