"""Parameters that a sharded model leaves unsharded, such as adapters.

Every rank holds all of them. Their gradients are all-reduced once per batch. If only a small part
of a model is trained, storing that part on each device costs less than gathering it in every pass.
The model's own Parameter objects stay in use, so any optimizer can train them and any library can
save them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import RequestError
from ..packed import list_statistics
from ..sums.collectives import own_collectives, spread
from .place import ShardRank
from .slot import Slot, byte_count
from .unit import choose_dtype, find_parameters, is_lookup

STATE_COPIES = 4  # copies of a trained parameter: itself, its gradient, two for the optimizer
MOST_PART = 0.25  # maximum fraction of the model's bytes for such parameters on each device


def estimate_gathered_bytes(
    model: Any,
    units: Mapping[str, Any],
    dtype: Any,
    autocast_dtype: Any = None,
    received: float | None = None,
) -> int:
    """Estimate a rank's peak memory in bytes, not counting its shards and its activations.

    This memory holds gathered parameters, gradients that are being reduced, and unsharded
    parameters. Arguments:

    - `units`: modules whose parameters are gathered together, by name.
    - `dtype`: dtype of computation; None leaves each parameter its own.
    - `autocast_dtype`: dtype of an autocast around each forward pass, or None.
    - `received`: upper bound for the bytes of gradients that a rank receives from other ranks, as
      returned by `bound_received`; None if gradients are reduced in the dtype of the shards.
    """
    # an embedding is freed before its gradients are reduced, so its parameters don't count then
    parameters = find_parameters(model, units)
    whole = choose_whole(parameters)
    sizes = {
        name: _measure([slot for slot in own if slot not in whole], dtype, autocast_dtype, received)
        for name, own in parameters.items()
    }
    root = sizes.pop("")
    lookups = [size for name, size in sizes.items() if is_lookup(units[name])]
    others = [size for name, size in sizes.items() if not is_lookup(units[name])]
    peaks = [
        root.buffer,
        _add_largest(sizes.values()),  # in the forward pass
        _add_largest(others) + max((each.reduced for each in others), default=0),
        max((lookup.reduced for lookup in lookups), default=0),
    ]
    unsharded = STATE_COPIES * sum(byte_count(slot.tensor) for slot in whole)
    unsharded += sum(map(byte_count, list_statistics(model.parameters())))
    return root.gathered + root.gradients + max(peaks) + unsharded


class UnitBytes(NamedTuple):
    """Bytes of a unit's gathered parameters, of its gradients, and of the buffer to sum them in."""

    gathered: int
    gradients: int
    buffer: int

    @property
    def reduced(self) -> int:
        """Bytes of the gradients and of the buffer in which they are reduced."""
        return self.gradients + self.buffer


def _add_largest(units: Iterable[UnitBytes]) -> int:
    """Return the bytes of gathered parameters in the two largest units together."""
    # while one unit computes, the next one is already being gathered
    return sum(sorted((unit.gathered for unit in units), reverse=True)[:2])


def _measure(
    own: Sequence[Slot], dtype: Any, autocast_dtype: Any, received: float | None
) -> UnitBytes:
    gathered = gradients = buffer = 0
    flats: defaultdict[torch.dtype, list[Slot]] = defaultdict(list)  # the trained parameters
    for slot in own:
        gathered += slot.numel * choose_dtype(slot, dtype, autocast_dtype).itemsize
        if slot.tensor.requires_grad:
            flats[slot.tensor.dtype].append(slot)
    for slots in flats.values():
        computed = sum(
            slot.numel * choose_dtype(slot, dtype, autocast_dtype).itemsize for slot in slots
        )
        stored = sum(byte_count(slot.tensor) for slot in slots)
        gradients += computed
        if received is None or computed >= stored:
            buffer += stored
        else:  # copies of a unit's own, and received ones, while the next unit's are computed
            buffer += round(computed * (1 + received))
    return UnitBytes(gathered, gradients, buffer)


def choose_whole(parameters: Mapping[str, Sequence[Slot]]) -> list[Slot]:
    """Choose the trained parameters to leave unsharded.

    These are all trained parameters if they take, with their gradients and optimizer state, at most
    a quarter of the model's bytes. Otherwise the result is [].
    """
    slots = [slot for unit in parameters.values() for slot in unit]
    trained = [slot for slot in slots if slot.tensor.requires_grad]
    everything = sum(byte_count(slot.tensor) for slot in slots)
    state = STATE_COPIES * sum(byte_count(slot.tensor) for slot in trained)
    return trained if state <= MOST_PART * everything else []


class WholeParameters:
    """Unsharded parameters of a sharded model, whose gradients are all-reduced once per batch.

    Arguments:

    - `place`: this rank, and the size of each rank's part.
    - `slots`: the parameters.
    - `ledger`: counts the bytes in use.
    """

    # A hook moves each weighted gradient to a buffer as soon as it is computed. The buffer is all-
    # reduced once per batch. Then gradients from before the batch are added.

    def __init__(self, place: ShardRank, slots: Sequence[Slot], ledger: Any) -> None:
        self.slots = list(slots)
        self._place, self._ledger = place, ledger
        # buffers with this rank's gradients, until the all-reduce
        self._sums: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[Slot, torch.Tensor] = {}  # each parameter's view of the buffer
        # gradients from before the batch
        self._earlier: dict[Slot, torch.Tensor | None] | None = None
        self.waits = False  # True if gradients of earlier passes wait for the all-reduce
        self._counted = False  # True if the gradients are in the ledger
        for slot in self.slots:
            tensor = slot.tensor
            tensor.data = tensor.data.to(place.device)
            slot.piece = slot.whole = tensor
            slot.tensor = None
        self.parameters = [slot.piece for slot in self.slots]
        ledger.add("whole", sum(map(byte_count, self.parameters)))
        if not place.single_rank:
            with torch.no_grad(), own_collectives():
                spread(self.parameters)

    def hook(self, begin: Callable[[], None], weight: Callable[[], float]) -> None:
        """Register hooks on the parameters' gradients.

        A hook first calls `begin`, then adds the gradient, multiplied by `weight()`, to those of
        the batch.
        """
        for slot in self.slots:
            slot.piece.register_hook(lambda _: begin())
            slot.piece.register_post_accumulate_grad_hook(
                lambda _, slot=slot: self._take(slot, weight())
            )

    def begin(self) -> None:
        """Set aside the gradients that the parameters have from earlier batches."""
        if self._earlier is None:
            self._earlier = {slot: slot.piece.grad for slot in self.slots}
        for slot in self.slots:
            slot.piece.grad = None

    def _take(self, slot: Slot, weight: float) -> None:
        gradient, slot.piece.grad = slot.piece.grad, None
        slot.has_fired = True
        if not self._views:
            self._open()
        if weight:  # 0 times an infinite gradient would be NaN
            with torch.no_grad():
                self._views[slot].add_(gradient, alpha=weight)

    def _open(self) -> None:
        for dtype in dict.fromkeys(slot.piece.dtype for slot in self.slots):
            slots = [slot for slot in self.slots if slot.piece.dtype == dtype]
            sizes = [slot.numel for slot in slots]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=self._place.device)
            self._ledger.add("gathered", byte_count(flat))
            self._sums[dtype] = flat
            for slot, part in zip(slots, flat.split(sizes), strict=True):
                self._views[slot] = part.view(slot.shape)

    def keep(self) -> None:
        """Keep the gradients of this pass, to all-reduce them after a later pass."""
        # until then, `.grad` is a view of the buffer; if it changes, zero_grad() was called too
        # early
        self.waits = True
        for slot in self.slots:
            if slot.has_fired:
                slot.piece.grad = self._views[slot].detach()
                slot.kept = slot.piece.grad._version

    def add_up(self) -> None:
        """All-reduce the gradients that the batch's passes have accumulated.

        Every rank has to call this.
        """
        if not self._views:
            self._open()  # this rank used none of them
        if not self._place.single_rank:
            with own_collectives():
                for flat in self._sums.values():
                    dist.all_reduce(flat)

    def set_gradients(self, used: Sequence[bool]) -> None:
        """Set `.grad` to the all-reduced gradients plus the gradients that `begin` set aside.

        `used` has a flag for each parameter, which is True if any rank has computed its gradient.
        """
        earlier = self._earlier or {}
        for slot, is_used in zip(self.slots, used, strict=True):
            before = earlier.get(slot)
            if before is not None:
                slot.piece.grad = before.add_(self._views[slot]) if is_used else before
            else:
                slot.piece.grad = self._views[slot] if is_used else None
            slot.has_fired = False
        size = 0 if self._counted else sum(map(byte_count, self._sums.values()))
        self._close()
        self._ledger.add("whole", size)  # the gradients, which stay allocated
        self._counted = True

    def forget(self) -> None:
        """Discard all gradients."""
        for slot in self.slots:
            slot.has_fired = False
            slot.piece.grad = None
        self._close()

    def _close(self) -> None:
        size = sum(map(byte_count, self._sums.values()))
        self._ledger.add("gathered", -size)
        self._sums, self._views, self._earlier, self.waits = {}, {}, None, False

    def check_kept(self) -> None:
        """Raise a RequestError if the user's loop cleared gradients before their all-reduce."""
        if self.waits and not all(slot.is_kept() for slot in self.slots if slot.has_fired):
            raise RequestError(
                "Gradients were cleared between the passes, or the batches, of a sum.",
                "Call zero_grad() after the optimizer's step alone.",
            )
