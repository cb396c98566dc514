"""Clipping, loss scaling and optimizers of a sharded model, which need its gradients as a whole.

An optimizer trains this rank's pieces. That is what one process does if each element's step depends on it alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache, reduce
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import optim
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import RequestError
from ..torch_split.collectives import own_collectives
from .sharded import Sharded

ELEMENTWISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
_all: weakref.WeakSet[Sharded] = weakref.WeakSet()
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that pieces have taken the place of
_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()


def look_after(sharded: Sharded, replaced: Iterable[Any]) -> None:
    """Have clipping, loss scaling and optimizers do right by this model, whose parameters were `replaced`."""
    _all.add(sharded)
    _replaced.update((each, True) for each in replaced)
    _patch()


@cache
def _patch() -> None:
    norm, unscale = clip_grad._get_total_norm, torch.amp.GradScaler._unscale_grads_

    def total_norm(tensors: Any, norm_type: float = 2.0, *options: Any, **named: Any) -> Any:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return sum_norms(norm, listed, float(norm_type), *options, **named)

    def unscale_on_all(scaler: Any, optimizer: Any, *arguments: Any) -> Any:
        found = unscale(scaler, optimizer, *arguments)
        if find(optimizer) is not None:  # a rank sees overflows in its shard alone
            for each in found.values():
                _reduce(each, dist.ReduceOp.MAX)
        return found

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = total_norm
    torch.amp.GradScaler._unscale_grads_ = unscale_on_all
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def sum_norms(norm: Callable[..., Any], tensors: list[Any], kind: float, *options: Any, **named: Any) -> Any:
    """The norm of gradients, by torch's function `norm` for those of one process; of shards over all ranks."""
    shards = {id(each.grad) for sharded in _all for each in sharded.parameters if each.grad is not None}
    own = [each for each in tensors if id(each) in shards]
    if not own:
        return norm(tensors, kind, *options, **named)
    strict = options[0] if options else named.pop("error_if_nonfinite", False)
    if kind == 0:
        raise RequestError("norm_type=0 counts tensors, and ranks have pieces of them.", "Clip by another norm.")
    parts = [each for each in own if each.numel()]
    total = _sum_powers(norm(parts, kind) if parts else None, kind, own[0].device)
    total = total.to(reduce(torch.promote_types, {each.dtype for each in own}))
    rest = [each for each in tensors if id(each) not in shards]
    if rest:
        total = norm([total, *rest], kind)
    if strict and not torch.isfinite(total):
        raise RuntimeError(f"The norm of the gradients is {float(total)}, so they can't be clipped.")
    return total


def _sum_powers(own: torch.Tensor | None, kind: float, device: Any) -> torch.Tensor:
    """The norm over all ranks in float64, as powers of half precision overflow; None is a rank without elements."""
    if kind in (float("inf"), float("-inf")):
        total = torch.full((), max(0.0, -kind), device=device, dtype=torch.float64) if own is None else own.double()
        _reduce(total, dist.ReduceOp.MAX if kind > 0 else dist.ReduceOp.MIN)
        return total
    total = torch.zeros((), dtype=torch.float64, device=device) if own is None else own.double() ** kind
    _reduce(total, dist.ReduceOp.SUM)
    return total ** (1 / kind)


def _reduce(tensor: torch.Tensor, operation: Any) -> None:
    if not dist.is_initialized():
        return  # a rank that is measured alone
    with own_collectives():
        dist.all_reduce(tensor, operation)


def move(optimizer: Any, replaced: Iterable[Any], model: Any) -> None:
    """Have an optimizer that has not stepped train a model's pieces in place of the parameters `replaced` by them."""
    if optimizer.state:
        raise RequestError(
            f"{type(optimizer).__name__} has state before its first step, of the whole model.", "Use AdamW or SGD."
        )
    now = dict(zip(map(id, replaced), model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [now.get(id(each), each) for each in group["params"]]


def find(optimizer: Any) -> Sharded | None:
    """The sharded model whose pieces an optimizer trains, or None."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return next((each for each in _all if not trained.isdisjoint(map(id, each.parameters))), None)


def _before_step(optimizer: Any, _: Any, __: Any) -> None:
    sharded = find(optimizer)
    if sharded is not None and sharded.waits:
        raise RequestError(
            "Gradients weren't summed before the optimizer's step: the last backward pass was under no_sync.",
            "Leave the last backward pass before each step out of no_sync, also at the end of an epoch.",
        )
    if optimizer not in _looked_at:
        _look_at(optimizer, sharded)


def _look_at(optimizer: Any, sharded: Sharded | None) -> None:
    """RequestError before its first step if it can't train a sharded model's pieces."""
    if any(each in _replaced for group in optimizer.param_groups for each in group["params"]):
        raise RequestError(
            "The optimizer has the model's parameters from before split.shard, which are no longer trained.",
            "Make the optimizer after split.shard.",
        )
    if sharded is not None:
        if unwrap(type(optimizer).step) not in {unwrap(kind.step) for kind in ELEMENTWISE}:
            raise RequestError(
                f"{type(optimizer).__name__} looks at whole parameters, and a sharded model's ranks have pieces.",
                "Use AdamW, SGD or another of torch.optim whose steps are taken element by element.",
            )
        optimizer.register_state_dict_pre_hook(_refuse_state)
    _looked_at.add(optimizer)


def _after_step(optimizer: Any, _: Any, __: Any) -> None:
    sharded = find(optimizer)
    if sharded is not None and not sharded.held.now["state"]:
        sharded.held.note_state(optimizer)


def _refuse_state(_: Any) -> None:
    raise RequestError("An optimizer's state is of this rank's shard.", "Use split.optimizer_state or split.save.")
