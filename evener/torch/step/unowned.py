"""Weight and sum gradients of tensors that an optimizer trains but no module owns.

Examples are SAC's `log_alpha = torch.zeros(1, requires_grad=True)` and the log variances of several
tasks.

Such tensors aren't in any wrapped model, so they are found through their optimizers. Their
gradients are weighted when they are computed, and summed over the ranks at the end of a batch's
last backward pass. The result is the sum of (n_i / N) * gradient_i over all ranks i, with n_i of N
rows on rank i.
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
from ..sums.exchange import exchanged_parameters, is_in_backward

Weigh = Callable[[], float | None]


class UnownedTensors:
    """Weights and sums the gradients of tensors that optimizers train but no module owns."""

    def __init__(self) -> None:
        self._groups: list[TensorGroup] = []
        # returns the function that computes the gradients' weight in the current run, if any
        self.weigh: Callable[[], Weigh | None] = lambda: None
        self.device = torch.device("cpu")  # the training run's device, for collectives
        self.syncs = True  # True if backward passes end with an all-reduce

    def find(self) -> None:
        """Search all optimizers in this process for trained tensors that no module owns."""
        known = {id(each) for group in self._groups for each in group.alive()}
        modules, optimizers = _list_alive(torch.nn.Module, Optimizer)
        known |= {*_owned_by(modules), *exchanged_parameters()}
        for optimizer in optimizers:
            found = [each for each in _trained_by(optimizer) if id(each) not in known]
            known.update(map(id, found))
            for kind in dict.fromkeys((each.dtype, each.device) for each in found):
                same = [each for each in found if (each.dtype, each.device) == kind]
                self._groups.append(TensorGroup(same, self))

    def check(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Check the gradients of parameters that no module owns, and return the other parameters.

        Every rank has to call this before an optimizer's step. Raises RequestError if gradients
        were neither summed over ranks nor equal on all ranks.
        """
        owned = _owned_by(*_list_alive(torch.nn.Module))
        unowned = [parameter for parameter in parameters if id(parameter) not in owned]
        unknown = [each for each in unowned if not self._has_summed(each)]
        if unknown and not self._are_alike([each.grad for each in unknown]):
            raise RequestError(
                f"The optimizer trains {len(unknown)} tensors that no module has, with gradients "
                f"of this rank's rows alone.",
                "Make it before the loop over split.loader begins, and call backward(), which fills"
                " their gradients; or have them in the model that split.wrap wraps, as"
                " nn.Parameter.",
            )
        return [parameter for parameter in parameters if id(parameter) in owned]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which gradients are accumulated without an all-reduce."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def _has_summed(self, tensor: torch.Tensor) -> bool:
        return any(group.has_summed(tensor) for group in self._groups)

    def weight(self) -> float | None:
        """Return the weight of this rank's gradients, or None if they aren't weighted.

        For example, they aren't weighted during an audit.
        """
        weigh = self.weigh()
        return None if weigh is None else weigh()

    def _are_alike(self, gradients: Sequence[Any]) -> bool:
        """Return whether the gradients are equal on all ranks.

        Every rank has to call this.
        """
        # for example, a loop copies them from a wrapped model after its gradients were summed
        flat = torch.cat([gradient.detach().reshape(-1).to(self.device) for gradient in gradients])
        least = -flat
        with own_collectives():
            dist.all_reduce(flat, dist.ReduceOp.MAX)
            dist.all_reduce(least, dist.ReduceOp.MAX)
        return bool(torch.equal(flat, -least))


class TensorGroup:
    """Tensors of one dtype and device, whose gradients are all-reduced together."""

    def __init__(self, tensors: Sequence[torch.Tensor], unowned: UnownedTensors) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self._unowned = unowned
        self._task = -1  # the current backward pass
        self._before: dict[int, tuple[Any, torch.Tensor]] = {}  # old and new gradients, by index
        # weighted gradients of this backward pass, by index
        self._came: dict[int, torch.Tensor] = {}
        # gradients that wait for an all-reduce, by index
        self._waiting: dict[int, torch.Tensor] = {}
        self._summed: set[int] = set()
        self._begins = True  # True until ranks have compared the tensors' initial values
        own = weakref.proxy(self)
        for index, each in enumerate(tensors):
            each.register_hook(partial(_note_gradient, own, index))
            each.register_post_accumulate_grad_hook(partial(_take_gradient, own, index))

    def alive(self) -> list[torch.Tensor]:
        """Return the tensors that still exist."""
        every = [reference() for reference in self._tensors]
        return [each for each in every if each is not None]

    def has_summed(self, tensor: torch.Tensor) -> bool:
        """Return whether a gradient of the tensor was ever summed over ranks."""
        return any(self._tensors[index]() is tensor for index in self._summed)

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """Remember a new gradient and the tensor's old `.grad`, before autograd adds the two.

        `index` is the tensor's index in the group.
        """
        # this is called before the gradient is accumulated, so that `take` can undo that;
        # torch.autograd.grad accumulates nothing and doesn't lead to `take`
        task = backward_number()
        if task != self._task:  # drop the remains of a failed pass
            self._task, self._before, self._came = task, {}, {}
            self._call_at_the_end(task)
        tensor = self._tensors[index]()
        if tensor is not None:
            before = None if tensor.grad is None else tensor.grad.detach().clone()
            self._before[index] = before, gradient.detach()

    def take(self, index: int, tensor: torch.Tensor) -> None:
        """Undo autograd's update of `.grad`, and store the weighted gradient for the all-reduce.

        `index` is the tensor's index in the group. Raises RequestError for sparse gradients.
        """
        weight = self._unowned.weight()
        if weight is None or index not in self._before:
            return
        before, gradient = self._before.pop(index)
        if gradient.is_sparse:
            raise RequestError(
                "A tensor that no module has gets a sparse gradient, which isn't summed.",
                "Have it in the model that split.wrap wraps, or make its gradient dense.",
            )
        own = gradient * weight if weight else torch.zeros_like(gradient)
        tensor.grad = torch.zeros_like(tensor) if before is None else before
        self._came[index] = self._came[index] + own if index in self._came else own

    def _call_at_the_end(self, task: int) -> None:
        """Sum the gradients at the end of the backward pass, after the sums of all wrapped models.

        `task` is the number of the backward pass.
        """
        # the order of collectives is then the same on every rank
        own = weakref.ref(self)

        def end() -> None:
            group = own()
            if group is None:
                return
            if is_in_backward(task):
                group._call_at_the_end(task)
            else:
                group._end()

        call_after_backward(end)

    def _end(self) -> None:
        for index, own in self._came.items():
            waiting = self._waiting.get(index)
            self._waiting[index] = own if waiting is None else waiting + own
        self._came = {}
        if self._waiting and self._unowned.syncs:
            self._sum()

    def _sum(self) -> None:
        """All-reduce the gradients and add them to `.grad`."""
        if self._begins:
            self._begins = False
            self._check_starts()
        alive = [reference() for reference in self._tensors]
        kind = next(iter(self._waiting.values()))
        parts = [
            self._waiting[index].reshape(-1) if index in self._waiting else kind.new_zeros(size)
            for index, size in enumerate(self._sizes)
        ]
        came = [float(index in self._waiting) for index in range(len(parts))]
        flat = torch.cat([*parts, kind.new_tensor(came)]).to(self._unowned.device)
        with own_collectives():
            dist.all_reduce(flat)
        *sums, came_anywhere = flat.to(kind.device).split([*self._sizes, len(parts)])
        self._waiting = {}
        for index, (tensor, total) in enumerate(zip(alive, sums, strict=True)):
            # if no rank has a gradient, `.grad` stays as it is
            if tensor is None or not came_anywhere[index]:
                continue
            total = total.view_as(tensor)
            tensor.grad = total.clone() if tensor.grad is None else tensor.grad + total
            self._summed.add(index)

    def _check_starts(self) -> None:
        values = [each.detach().double().flatten().tolist() for each in self.alive()]
        with own_collectives():
            same = is_equal_everywhere(crc32(repr(values).encode()), self._unowned.device)
        if not same:
            raise RequestError(
                "A tensor that an optimizer trains and no module has begins with different values "
                "on different ranks.",
                "Draw it after the same torch.manual_seed on every rank, or have it in the model"
                " that split.wrap wraps, as nn.Parameter.",
            )


UNOWNED = UnownedTensors()


def trains_others(optimizer: Any, models: Iterable[Any]) -> bool:
    """Return whether the optimizer trains a tensor that isn't a parameter of `models`."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(each) not in known for each in _trained_by(optimizer))


def _note_gradient(group: Any, index: int, gradient: torch.Tensor) -> None:
    group.note(index, gradient)


def _take_gradient(group: Any, index: int, tensor: torch.Tensor) -> None:
    group.take(index, tensor)


def _trained_by(optimizer: Any) -> list[torch.Tensor]:
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        each
        for each in every
        if each.requires_grad and each.is_leaf and type(each.data).__name__ != "DTensor"
    ]


def _owned_by(modules: Iterable[Any]) -> set[int]:
    """Return the ids of the modules' own parameters, not including those of submodules."""
    return {id(each) for module in modules for each in vars(module).get("_parameters", {}).values()}


def _list_alive(*classes: type) -> list[list[Any]]:
    """Return, for each class, all its instances that exist in this process."""
    # all objects are searched only once
    alive = [each for each in gc.get_objects() if issubclass(type(each), classes)]
    return [[each for each in alive if issubclass(type(each), one)] for one in classes]
