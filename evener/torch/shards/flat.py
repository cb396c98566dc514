"""The parameters of a module in one flat tensor; each rank stores a part (shard) of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..packed import is_packed
from ..private import copy_each
from ..sums.collectives import own_collectives
from .gathered import Gathered, sort_slots
from .place import Parts, ShardRank, cut
from .sender import GradientSender, saves_memory
from .slot import Slot, byte_count


class Flat:
    """Parameters of a module in one flat tensor; each rank stores a part (shard) of it.

    A parameter's piece is the part of it that is in this rank's shard.

    Arguments:

    - `place`: this rank, and the size of each rank's part.
    - `slots`: the parameters, all of one dtype, and all trained or all frozen.
    - `ledger`: counts the bytes in use.
    """

    def __init__(self, place: ShardRank, slots: Sequence[Slot], ledger: Any) -> None:
        first = slots[0].tensor
        self.slots = sort_slots(slots)
        self.trainable, self.ledger, self._place = first.requires_grad, ledger, place
        self.packed = is_packed(first)
        self.elements = 0
        for slot in self.slots:
            slot.start = self.elements
            self.elements += slot.numel
        self.cuts = cut(self.elements, place.parts)
        self.rank = place.rank
        self.start, self.stop = self.cuts[place.rank]
        filled = torch.zeros(self.cuts[-1][1], dtype=first.dtype, device=place.device)
        if first.device.type != "meta":
            self._copy_whole(filled)
        self.shard = filled[self.start : self.stop].clone()
        del filled
        self.gathered = Gathered(place, self.slots, self.cuts, self.shard)
        self._on_nccl = place.on_nccl
        padding = self.cuts[-1][1] - self.elements
        self._sizes = [*(slot.numel for slot in self.slots), padding]
        self._grads: torch.Tensor | None = None  # gradients of all parameters for this rank's rows
        self._grad_shard: torch.Tensor | None = None
        self._sender: GradientSender | None = None  # if gradients are sent as they are computed
        self._sends = False  # True while the sender's gradients are underway
        self._computed_bytes = 0  # gradients of whole parameters that the ledger counts
        self._work: list[Any] = []
        for slot in self.slots:
            low, high = self.range_of(slot)
            whole = self.gathered.view_of(slot)
            if self.packed:
                slot.whole = slot.tensor  # it holds the statistics with which its layer unpacks it
                slot.whole.data = whole
            else:
                slot.whole = torch.nn.Parameter(whole, requires_grad=self.trainable)
            slot.piece = torch.nn.Parameter(self.shard[low:high], requires_grad=self.trainable)
            slot.point_to(slot.piece)
            slot.tensor = None
        self.gathered.free()
        sizes = [slot.piece.numel() for slot in self.slots]
        self._piece_sizes = [*sizes, len(self.shard) - sum(sizes)]
        ledger.add("shards", byte_count(self.shard))

    def _copy_whole(self, filled: torch.Tensor) -> None:
        with torch.no_grad():
            for slot in self.slots:
                filled[slot.start : slot.start + slot.numel].copy_(slot.tensor.detach().reshape(-1))
        if self._place.single_rank:
            return
        with own_collectives():
            dist.broadcast(filled, 0)

    def range_of(self, slot: Slot) -> tuple[int, int]:
        """Return where a parameter begins and ends in this rank's shard.

        The result is (0, 0) for a parameter that isn't in the shard.
        """
        low, high = max(slot.start, self.start), min(slot.start + slot.numel, self.stop)
        return (low - self.start, high - self.start) if low < high else (0, 0)

    # ------------------------------------------------------------------ whole parameters

    def gather(self) -> list[Any]:
        """Start to gather the parameters from all ranks, and return the handles to wait for."""
        self.ledger.add("gathered", self.gathered.size)
        return self.gathered.gather()

    def collect(self, whole: torch.Tensor, shard: torch.Tensor) -> list[Any]:
        """Start to gather a sharded tensor into `whole`, and return the handles to wait for.

        `shard` is this rank's part of the tensor.
        """
        parts = Parts(whole, self.cuts, self.rank, self._on_nccl)
        parts.own.copy_(shard)
        return parts.gather()

    def free(self) -> None:
        """Free the gathered parameters, but not this rank's shard."""
        self.ledger.add("gathered", -self.gathered.size)
        self.gathered.free()

    # ------------------------------------------------------------------ gradients

    def send_as_computed(self) -> None:
        """Send gradients in the dtype of computation from now on, if that takes fewer bytes.

        Every backward pass must then end with a reduction.
        """
        as_stored = self.cuts[-1][1] * self.shard.element_size()
        is_shorter = self.gathered.size < as_stored
        if is_shorter and self._place.exchanges_bytes and saves_memory(self.cuts):
            segments = self.gathered.segments
            self._sender = GradientSender(
                self._place, self.slots, segments, self.cuts, self.shard.dtype
            )

    def _open(self) -> torch.Tensor:
        """Return the buffer that collects this rank's gradients.

        It is created, filled with zeros, if it doesn't exist yet.
        """
        # the reduction from an earlier use of the unit may still be running
        self.receive()
        if self._grads is None:
            length = self.cuts[-1][1]
            self._grads = torch.zeros(length, dtype=self.shard.dtype, device=self.shard.device)
            self.ledger.add("gathered", byte_count(self._grads))
        return self._grads

    def take(self, slot: Slot, weight: float) -> None:
        """Move a parameter's `.grad`, multiplied by `weight`, to the flat gradient buffer.

        It is added to the gradients of earlier passes in the buffer.
        """
        gradients = self._open()
        gradient, slot.whole.grad = slot.whole.grad, None
        if weight:  # 0 times an infinite gradient would be NaN
            with torch.no_grad():
                gradients[slot.start : slot.start + slot.numel].add_(
                    gradient.reshape(-1), alpha=weight
                )
        slot.has_fired = True

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _collect_gradients(self, weight: float) -> torch.Tensor:
        """Move all parameters' gradients to the flat buffer; return it, multiplied by `weight`."""
        # one copy operation for all gradients costs the host less time than one for each
        buffer = self._open()
        taken = [slot for slot in self.slots if slot.whole.grad is not None]
        if taken:
            parts = dict(zip(self.slots, buffer.split(self._sizes)[: len(self.slots)], strict=True))
            gradients = [slot.whole.grad.reshape(-1) for slot in taken]
            copy_each([parts[slot] for slot in taken], gradients)
            for slot in taken:
                slot.whole.grad, slot.has_fired = None, True
            self._uncount_gradients()
        if weight == 0.0:
            buffer.zero_()  # also clears infinite gradients
        elif weight != 1.0:
            buffer.mul_(weight)
        return buffer

    def count_gradients(self) -> None:
        """Record in the ledger how many bytes the gradients take before they are reduced."""
        gradients = [slot.whole.grad for slot in self.slots]
        size = sum([gradient.nbytes for gradient in gradients if gradient is not None])
        self.ledger.add("gathered", size - self._computed_bytes)
        self._computed_bytes = size

    def _uncount_gradients(self) -> None:
        self.ledger.add("gathered", -self._computed_bytes)
        self._computed_bytes = 0

    def keep(self) -> None:
        """Keep gradients for a later reduction, and remember their version counters.

        If a counter has changed by then, `zero_grad` was called in between.
        """
        # a piece without a `.grad` gets zeros, so that a zero_grad() before the reduction is
        # detected
        taken = [slot for slot in self.slots if slot.has_fired]
        for slot in taken:
            if slot.piece.grad is None:
                self._make_views()
                slot.piece.grad = slot.view.zero_()
        for slot in taken:  # views of one tensor share a version
            slot.kept = slot.piece.grad._version

    def send(self, weight: float) -> None:
        """Start to sum the gradients over ranks, with this rank's gradients multiplied by `weight`.

        Each rank receives the sums for its own shard.
        """
        if self._sender is not None:
            self.receive()
            self._send_all(self._sender, weight)
            return
        gradients = self._collect_gradients(weight)
        if self._place.single_rank:
            self._work = [_ALONE]
        else:
            self._work = Parts(gradients, self.cuts, self.rank, self._on_nccl).reduce()

    def _send_all(self, sender: GradientSender, weight: float) -> None:
        """Start to send this rank's gradients to the ranks that store their shards.

        The receiving ranks multiply them by `weight`.
        """
        gradients = [slot.whole.grad for slot in self.slots]
        self.ledger.add("gathered", sender.taken_bytes)
        sender.take(weight, gradients)
        for slot, gradient in zip(self.slots, gradients, strict=True):
            if gradient is not None:
                slot.whole.grad, slot.has_fired = None, True
        del gradient, gradients  # their memory is free before more is received
        self.ledger.add("gathered", sender.received_bytes - self._computed_bytes)
        self._computed_bytes = 0
        self._work, self._sends = sender.send(), True

    def receive(self) -> None:
        """Wait for the gradients that are summed over ranks, and add them to the shard's gradient.

        Nothing happens unless `send` was called.
        """
        if not self._work:
            return
        for work in self._work:
            work.wait()
        if self._sender is not None:
            summed = torch.empty_like(self.shard)
            self._sender.add_up(summed)
            self._accept_sums(summed, owns_memory=True)
            self.ledger.add("gathered", -self._sender.taken_bytes - self._sender.received_bytes)
            self._work, self._sends = [], False
            return
        assert self._grads is not None
        self._accept_sums(self._grads[self.start : self.stop])
        self.ledger.add("gathered", -byte_count(self._grads))
        self._work, self._grads = [], None

    def release_gradients(self) -> None:
        """Free the gradient of this rank's shard, unless a parameter's `.grad` still needs it."""
        # the next backward pass allocates it again, so that activations and gradients don't peak
        # together
        if self._grad_shard is None or any(slot.piece.grad is not None for slot in self.slots):
            return
        self.ledger.add("gradients", -byte_count(self._grad_shard))
        self._grad_shard = None
        for slot in self.slots:
            slot.view = None

    def _make_views(self, initial: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient of this rank's shard; create it first if it doesn't exist yet.

        A newly created gradient is the tensor `initial`, or zeros if `initial` is None, and each
        parameter gets a view of it.
        """
        if self._grad_shard is None:
            self._grad_shard = torch.zeros_like(self.shard) if initial is None else initial
            self.ledger.add("gradients", byte_count(self._grad_shard))
            views = self._grad_shard.split(self._piece_sizes)
            for slot, view in zip(self.slots, views, strict=False):  # the last view is padding
                slot.view = view
        return self._grad_shard

    def _accept_sums(self, summed: torch.Tensor, owns_memory: bool = False) -> None:
        """Add gradients that were summed over ranks to the gradient of this rank's shard.

        `owns_memory` is whether the tensor may be stored without a copy.
        """
        if self._has_gradients():
            self._add_to_earlier(summed)
        else:
            self._begin_gradients(summed, owns_memory)

    def _has_gradients(self) -> bool:
        """Return whether this rank's shard has a gradient from earlier backward passes."""
        return any(slot.received or slot.piece.grad is not None for slot in self.slots)

    def _begin_gradients(self, summed: torch.Tensor, owns_memory: bool) -> None:
        """Store a step's first reduced gradient as the gradient of this rank's shard.

        With `owns_memory`, the tensor itself is stored, else a copy.
        """
        gradients = self._make_views(summed if owns_memory else None)
        if gradients is not summed:
            gradients.copy_(summed)
        for slot in self.slots:
            slot.received, slot.before = True, False

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _add_to_earlier(self, summed: torch.Tensor) -> None:
        """Add a reduced gradient to the gradients from earlier passes or from other losses."""
        shard = self._make_views()
        fresh = [slot for slot in self.slots if not slot.received]
        for slot in fresh:
            slot.before = slot.piece.grad is not None
            if not slot.before:
                slot.view.zero_()
            elif slot.piece.grad is not slot.view:
                slot.view.copy_(slot.piece.grad)
            slot.received, slot.piece.grad = True, None
        shard.add_(summed)

    def forget(self) -> None:
        """Wait for running collectives, and discard all gradients."""
        for work in self._work:
            work.wait()
        self._uncount_gradients()
        if self._grads is not None:
            self.ledger.add("gathered", -byte_count(self._grads))
        if self._sender is not None and self._sends:
            self._sender.free()
            self.ledger.add("gathered", -self._sender.taken_bytes - self._sender.received_bytes)
        self._work, self._grads, self._sends = [], None, False
        for slot in self.slots:
            slot.received = slot.before = slot.has_fired = False
            slot.piece.grad = slot.whole.grad = None

    def set_gradients(self, used: Sequence[bool]) -> None:
        """Set the `.grad` of each parameter's piece to the reduced gradient.

        `used` has a flag for each parameter, which is True if any rank has computed its gradient.
        """
        for slot, is_used in zip(self.slots, used, strict=True):
            if not slot.received:
                continue
            if slot.piece.grad is not None:  # from a loss on the parameters themselves
                slot.view.add_(slot.piece.grad)
            if is_used or slot.before or slot.piece.grad is not None:
                slot.piece.grad = slot.view
            slot.received = slot.before = slot.has_fired = False


_ALONE = SimpleNamespace(wait=lambda: None)  # the work handle of a sum on one rank
