"""Tensors that an optimizer trains and no module has, such as `log_alpha = torch.zeros(1,
requires_grad=True)` of SAC, or the log variances of several tasks.

No forward pass of a wrapped model shows them, so they are found by the optimizers that hold them.
Their gradients are weighted as they come, sum_i (n_i / N) * gradient_i as those of a wrapped model,
and summed at the end of each backward pass, in passes of a batch at the end of the last one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import RequestError
from ..private import backward_number, call_after_backward
from ..sums.collectives import is_equal_everywhere, own_collectives
from ..sums.exchange import exchanged_parameters, goes_through

Weigh = Callable[[], float | None]


class LooseTensors:
    """The loose tensors of this process, in groups of one optimizer, type and device."""

    def __init__(self) -> None:
        self._groups: list[TensorGroup] = []
        # returns the function that weighs a gradient of the training that is under way, if one is
        self.weigh: Callable[[], Weigh | None] = lambda: None
        self.device = torch.device("cpu")  # of the training, on which ranks can meet
        self.syncs = True  # backward passes end in a sum

    def look(self) -> None:
        """Find the tensors that optimizers hold by now."""
        known = {id(each) for group in self._groups for each in group.alive()}
        known |= {*_owned_by_modules(), *exchanged_parameters()}
        for optimizer in _alive(Optimizer):
            found = [each for each in _trained_by(optimizer) if id(each) not in known]
            known.update(map(id, found))
            for kind in dict.fromkeys((each.dtype, each.device) for each in found):
                same = [each for each in found if (each.dtype, each.device) == kind]
                self._groups.append(TensorGroup(same, self))

    def check(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that modules have; RequestError if an optimizer is about to step by
        gradients of loose ones that are of this rank's rows alone. Every rank calls it.
        """
        owned = _owned_by_modules()
        loose = [each for each in parameters if id(each) not in owned]
        unknown = [each for each in loose if not self._has_summed(each)]
        if unknown and not self._are_alike([each.grad for each in unknown]):
            raise RequestError(
                f"The optimizer trains {len(unknown)} tensors that no module has, by gradients of "
                f"this rank's rows alone.",
                "Make it before the loop over split.loader begins, and call backward(), which fills"
                " their gradients; or have them in the model that split.wrap wraps, as"
                " nn.Parameter.",
            )
        return [each for each in parameters if id(each) in owned]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose backward passes leave their gradients for a later sum."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def _has_summed(self, tensor: torch.Tensor) -> bool:
        return any(group.has_summed(tensor) for group in self._groups)

    def weight(self) -> float | None:
        """This rank's part of the batch that goes backward; None where nothing is trained."""
        weigh = self.weigh()
        return None if weigh is None else weigh()

    def _are_alike(self, gradients: Sequence[Any]) -> bool:
        """True if all ranks have these gradients, as where a loop copies them from a wrapped
        model's.
        """
        flat = torch.cat([each.detach().reshape(-1).to(self.device) for each in gradients])
        least = -flat
        with own_collectives():
            dist.all_reduce(flat, dist.ReduceOp.MAX)
            dist.all_reduce(least, dist.ReduceOp.MAX)
        return bool(torch.equal(flat, -least))


class TensorGroup:
    """Loose tensors of one optimizer, whose gradients are summed in one exchange."""

    def __init__(self, tensors: Sequence[torch.Tensor], loose: LooseTensors) -> None:
        self._tensors = [weakref.ref(each) for each in tensors]
        self._sizes = [each.numel() for each in tensors]
        self._loose = loose
        self._task = -1  # the backward pass that goes on
        self._before: dict[int, tuple[Any, torch.Tensor]] = {}  # gradients so far and new, by place
        self._came: dict[int, torch.Tensor] = {}  # weighted, in this backward pass
        self._waiting: dict[int, torch.Tensor] = {}  # of passes whose sum comes later
        self._summed: set[int] = set()
        self._begins = True  # ranks haven't compared where they begin
        own = weakref.proxy(self)
        for place, each in enumerate(tensors):
            each.register_hook(partial(_note_gradient, own, place))
            each.register_post_accumulate_grad_hook(partial(_take_gradient, own, place))

    def alive(self) -> list[torch.Tensor]:
        """The tensors that are left."""
        every = [reference() for reference in self._tensors]
        return [each for each in every if each is not None]

    def has_summed(self, tensor: torch.Tensor) -> bool:
        """True if a gradient of this tensor was summed."""
        return any(self._tensors[place]() is tensor for place in self._summed)

    def note(self, place: int, gradient: torch.Tensor) -> None:
        """A gradient comes, which is added to those that are there unless autograd.grad asked."""
        task = backward_number()
        if task != self._task:  # what a pass that failed left is dropped
            self._task, self._before, self._came = task, {}, {}
            self._call_at_the_end(task)
        tensor = self._tensors[place]()
        if tensor is not None:
            before = None if tensor.grad is None else tensor.grad.detach().clone()
            self._before[place] = before, gradient.detach()

    def take(self, place: int, tensor: torch.Tensor) -> None:
        """The gradient was added: take it away again until it is summed."""
        weight = self._loose.weight()
        if weight is None or place not in self._before:
            return
        before, gradient = self._before.pop(place)
        if gradient.is_sparse:
            raise RequestError(
                "A tensor that no module has gets a sparse gradient, which isn't summed.",
                "Have it in the model that split.wrap wraps, or make its gradient dense.",
            )
        own = gradient * weight if weight else torch.zeros_like(gradient)
        tensor.grad = torch.zeros_like(tensor) if before is None else before
        self._came[place] = self._came[place] + own if place in self._came else own

    def _call_at_the_end(self, task: int) -> None:
        """Sum after the wrapped models that this backward pass goes through, as on every rank."""
        own = weakref.ref(self)

        def end() -> None:
            group = own()
            if group is None:
                return
            if goes_through(task):
                group._call_at_the_end(task)
            else:
                group._end()

        call_after_backward(end)

    def _end(self) -> None:
        for place, own in self._came.items():
            waiting = self._waiting.get(place)
            self._waiting[place] = own if waiting is None else waiting + own
        self._came = {}
        if self._waiting and self._loose.syncs:
            self._sum()

    def _sum(self) -> None:
        """Sum over the ranks what each has; a tensor that has no gradient on any gets none."""
        if self._begins:
            self._begins = False
            self._check_starts()
        alive = [reference() for reference in self._tensors]
        kind = next(iter(self._waiting.values()))
        parts = [
            self._waiting[place].reshape(-1) if place in self._waiting else kind.new_zeros(size)
            for place, size in enumerate(self._sizes)
        ]
        came = [float(place in self._waiting) for place in range(len(parts))]
        flat = torch.cat([*parts, kind.new_tensor(came)]).to(self._loose.device)
        with own_collectives():
            dist.all_reduce(flat)
        *sums, came_anywhere = flat.to(kind.device).split([*self._sizes, len(parts)])
        self._waiting = {}
        for place, (tensor, total) in enumerate(zip(alive, sums, strict=True)):
            if tensor is None or not came_anywhere[place]:
                continue
            total = total.view_as(tensor)
            tensor.grad = total.clone() if tensor.grad is None else tensor.grad + total
            self._summed.add(place)

    def _check_starts(self) -> None:
        values = [each.detach().double().flatten().tolist() for each in self.alive()]
        with own_collectives():
            same = is_equal_everywhere(crc32(repr(values).encode()), self._loose.device)
        if not same:
            raise RequestError(
                "A tensor that an optimizer trains and no module has begins with other values on "
                "other ranks.",
                "Draw it after the same torch.manual_seed on every rank, or have it in the model"
                " that split.wrap wraps, as nn.Parameter.",
            )


LOOSE = LooseTensors()


def trains_others(optimizer: Any, models: Iterable[Any]) -> bool:
    """True if an optimizer trains what isn't a parameter of these models."""
    known = {id(each) for model in models for each in model.parameters()}
    return any(id(each) not in known for each in _trained_by(optimizer))


def _note_gradient(group: Any, place: int, gradient: torch.Tensor) -> None:
    group.note(place, gradient)


def _take_gradient(group: Any, place: int, tensor: torch.Tensor) -> None:
    group.take(place, tensor)


def _trained_by(optimizer: Any) -> list[torch.Tensor]:
    every = [each for group in optimizer.param_groups for each in group["params"]]
    return [
        each
        for each in every
        if each.requires_grad and each.is_leaf and type(each.data).__name__ != "DTensor"
    ]


def _owned_by_modules() -> set[int]:
    """The parameters of every module of this process, by id."""
    return {
        id(each)
        for module in _alive(torch.nn.Module)
        for each in vars(module).get("_parameters", {}).values()
    }


def _alive(kind: type) -> list[Any]:
    """The objects of a class that live in this process."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
