"""Let a rank without rows take part in the collectives of a sharded model without computing.

All ranks of a sharded model run the same gathers and reductions in the same order. A rank without
rows gets a filler row, whose gradients have weight 0. It computes that row until two consecutive
passes have run the same collectives. From then on it only runs these collectives, without
activations. The model returns copies of its outputs for the filler row. The backward pass through
them takes part in the other ranks' reductions. If inputs have other shapes than the recorded ones,
the model is run, because the other ranks' collectives may then differ, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from ..private import take_apart
from ..rows.structure import tensors_in
from .unit import Unit

Meeting = tuple[Unit, bool]  # a unit that is gathered (True), or whose gradients are reduced


class PassRecord:
    """The collectives of a forward and backward pass, and the outputs of its forward pass.

    A rank without rows repeats these collectives instead of running the model. It can only do so if
    its inputs have the same shapes as in the recorded pass.
    """

    def __init__(self, shapes: tuple[Any, ...]) -> None:
        self.shapes = shapes
        self.forward: list[Meeting] = []
        self.backward: list[Meeting] = []
        self.unsent: list[Unit] = []
        self.outputs: list[Any] = []  # the values in the model's outputs, without their graph
        self.put_together: Callable[[list[Any]], Any] = list  # builds outputs from such values
        self.trained: list[bool] = []  # whether each tensor in the outputs requires a gradient

    def is_like(self, other: PassRecord | None) -> bool:
        """Return whether both passes had the same input shapes and the same collectives."""
        if other is None:
            return False
        same = (self.shapes, self.forward, self.backward, self.unsent, self.trained)
        return same == (other.shapes, other.forward, other.backward, other.unsent, other.trained)


class Follower:
    """Lets a rank without rows take part in the collectives of each pass without running the model.

    At first, the model runs on a filler row. As soon as two consecutive passes have had the same
    collectives, later passes only repeat these.
    """

    def __init__(self, root: Unit, units: Sequence[Unit], device: Any) -> None:
        self._root, self._units, self._device = root, units, device
        self._running: PassRecord | None = None  # the pass that is being computed
        self._last: PassRecord | None = None  # the last computed pass
        # the pass that is repeated, because the last two passes were alike
        self._known: PassRecord | None = None
        self._meetings: list[Meeting] | None = None  # the list to which collectives are recorded
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
        """Get ready for a new pass: discard the record of an unfinished one."""
        self._running = self._meetings = None

    def end_backward(self) -> None:
        """Finish the record of a pass, and compare it with the record of the previous pass."""
        record, self._running, self._meetings = self._running, None, None
        if record is None:
            return
        record.unsent = [unit for unit in (self._root, *self._units) if unit.unsent]
        self._known = record if record.is_like(self._last) else None
        self._last = record

    # ------------------------------------------------------------------ a pass that is repeated

    def _repeat(self, record: PassRecord) -> Any:
        """Run the collectives of a recorded forward pass, and return its recorded outputs."""
        for unit, _ in record.forward:
            _gather(unit)
        for unit in self._units:
            unit.free()  # also units that were prefetched
        seen = filter(torch.is_tensor, record.outputs)
        start = torch.zeros((), device=self._device, requires_grad=True)
        made = iter(_Repeated.apply(self, record, start, *seen))
        return record.put_together(
            [next(made) if torch.is_tensor(output) else output for output in record.outputs]
        )

    def repeat_backward(self, record: PassRecord) -> None:
        """Run the collectives of a recorded backward pass, with gradients of zero."""
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
    """Autograd function that returns recorded outputs, and runs recorded backward collectives."""

    @staticmethod
    def forward(
        ctx: Any, follower: Follower, record: PassRecord, _: torch.Tensor, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.follower, ctx.record = follower, record
        made = tuple(output.clone() for output in outputs)
        pairs = zip(made, record.trained, strict=True)
        ctx.mark_non_differentiable(*(each for each, trained in pairs if not trained))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.follower.repeat_backward(ctx.record)
        return (None, None, None, *(None for _ in gradients))
