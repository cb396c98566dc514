"""A rank without rows: it holds a part of a sharded model's state, and computes nothing.

All ranks of a sharded model gather the same units, and sum their gradients, in the same order. A
rank without rows has a filler row, whose gradients have weight 0. It computes that row until two
passes were alike. From then on it repeats the gathers and sums of such a pass, without its
computation and its activations: the model returns what it returned for the filler row, and the
backward pass through that takes part in the other ranks' sums. Inputs of other shapes are computed
again, which meets the other ranks at the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from ..private import take_apart
from ..rows.structure import tensors_in
from .unit import Unit

Meeting = tuple[Unit, bool]  # a unit that is gathered (True), or whose gradients are summed


class PassRecord:
    """What one pass gathered and summed, for inputs of these shapes.

    `forward` are the meetings within the model's forward pass and `backward` those within the
    backward pass, in order; `unsent` are the units that are summed at its end.
    """

    def __init__(self, shapes: tuple[Any, ...]) -> None:
        self.shapes = shapes
        self.forward: list[Meeting] = []
        self.backward: list[Meeting] = []
        self.unsent: list[Unit] = []
        self.outputs: list[Any] = []  # of the model: what is in them, without their graph
        self.put_together: Callable[[list[Any]], Any] = list  # makes such outputs again
        self.trained: list[bool] = []  # whether each tensor of the outputs has a gradient

    def is_like(self, other: PassRecord | None) -> bool:
        """True if the other pass met the other ranks at the same places."""
        if other is None:
            return False
        same = (self.shapes, self.forward, self.backward, self.unsent, self.trained)
        return same == (other.shapes, other.forward, other.backward, other.unsent, other.trained)


class Follower:
    """Records the passes of a rank without rows, and repeats them without computing.

    `root` is the unit of the model itself, and `units` are the others.
    """

    def __init__(self, root: Unit, units: Sequence[Unit], device: Any) -> None:
        self._root, self._units, self._device = root, units, device
        self._running: PassRecord | None = None  # the pass that is computed now
        self._last: PassRecord | None = None  # the last one that was computed
        self._known: PassRecord | None = None  # what is repeated; like the pass before it
        self._meetings: list[Meeting] | None = None  # where meetings are noted now
        for unit in (root, *units):
            unit.met = self._note
        root.module.forward = self._wrap(root.module.forward)

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def follow(*arguments: Any, **keywords: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **keywords)
            given = tensors_in((arguments, keywords))
            shapes = (self._root.module.training, *((each.shape, each.dtype) for each in given))
            known = self._known
            if known is not None and known.shapes == shapes:
                return self._repeat(known)
            return self._record(shapes, lambda: forward(*arguments, **keywords))

        return follow

    def _note(self, unit: Unit, gathers: bool) -> None:
        if self._meetings is not None:
            self._meetings.append((unit, gathers))

    # ------------------------------------------------------------------ a pass that is computed

    def _record(self, shapes: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        record = self._running = PassRecord(shapes)
        self._meetings = record.forward
        outputs = compute()
        self._meetings = record.backward
        found, record.put_together = take_apart(outputs)
        record.trained = [each.requires_grad for each in found if torch.is_tensor(each)]
        record.outputs = [each.detach() if torch.is_tensor(each) else each for each in found]
        return outputs

    def begin_pass(self) -> None:
        """Drop the record of a pass that had no backward pass, or failed in it."""
        self._running = self._meetings = None

    def end_backward(self) -> None:
        """Complete the record as the backward pass ends, before the last sums."""
        record, self._running, self._meetings = self._running, None, None
        if record is None:
            return
        record.unsent = [unit for unit in (self._root, *self._units) if unit.unsent]
        self._known = record if record.is_like(self._last) else None
        self._last = record

    # ------------------------------------------------------------------ a pass that is repeated

    def _repeat(self, record: PassRecord) -> Any:
        """Take part in the gathers of a forward pass; return its outputs."""
        for unit, _ in record.forward:
            _gather(unit)
        for unit in self._units:
            unit.free()  # also what was gathered ahead
        seen = filter(torch.is_tensor, record.outputs)
        start = torch.zeros((), device=self._device, requires_grad=True)
        made = iter(_Repeated.apply(self, record, start, *seen))
        return record.put_together(
            [next(made) if torch.is_tensor(each) else each for each in record.outputs]
        )

    def repeat_backward(self, record: PassRecord) -> None:
        """Take part in the gathers and sums of a backward pass, with gradients of 0."""
        before: Unit | None = None
        for unit, gathers in record.backward:
            if gathers:
                _gather(unit)
                continue
            if before is not None:
                before.receive()
            unit.send(0.0)
            before = unit
        if before is not None:
            before.receive()
        for unit in record.unsent:
            unit.unsent = True


def _gather(unit: Unit) -> None:
    unit.gather()
    unit.free()


class _Repeated(torch.autograd.Function):  # type: ignore[misc]  # torch isn't followed
    """The outputs of a pass that is repeated; its backward pass repeats the pass's."""

    @staticmethod
    def forward(
        ctx: Any, follower: Follower, record: PassRecord, _: torch.Tensor, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.follower, ctx.record = follower, record
        made = tuple(each.clone() for each in outputs)
        pairs = zip(made, record.trained, strict=True)
        ctx.mark_non_differentiable(*(each for each, trained in pairs if not trained))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.follower.repeat_backward(ctx.record)
        return (None, None, None, *(None for _ in gradients))
