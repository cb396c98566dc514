"""Models whose gradients a library averages over ranks: FSDP1's, FSDP2's and DeepSpeed's.

The mean over ranks is that over all rows where each rank's loss counts `rows * ranks / all rows`,
which its backward pass begins with. The library's own shards, sums and states stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..torch.step import loose
from ..torch.step.weights import Weigh
from ..torch.step.wrapped import is_sharded

_LIBRARIES = {"FullyShardedDataParallel": "FSDP1", "DeepSpeedEngine": "DeepSpeed"}


def find_library(model: Any) -> str:
    """The library that averages a model's gradients over ranks; empty where none does."""
    if is_sharded(model):
        return "FSDP2"
    names = {kind.__name__ for kind in type(model).__mro__}
    return next((library for name, library in _LIBRARIES.items() if name in names), "")


def can_be_checked(models: Iterable[Any]) -> bool:
    """True if the loss of these models may be computed again: FSDP1 keeps what that moves."""
    return all(find_library(each) != "FSDP1" for each in models)


def has_copies(models: Iterable[Any]) -> bool:
    """True if optimizers step flat copies of the models' weights, as DeepSpeed's do."""
    return any(find_library(each) == "DeepSpeed" for each in models)


def trains_others(optimizer: Any, models: Iterable[Any]) -> bool:
    """True if an optimizer trains what isn't in these models, as far as can be seen."""
    return not has_copies(models) and loose.trains_others(optimizer, models)


def choose_weigh(models: Iterable[Any]) -> Weigh:
    """What is weighted by rows in a training of these models: gradients, or losses."""
    return "loss" if any(map(find_library, models)) else "gradients"


def name_wrapper(models: Iterable[Any]) -> str:
    """The library that exchanges the models' gradients, for people."""
    return next(filter(None, map(find_library, models)), "DistributedDataParallel")


def follow(training: Any, model: Any) -> None:
    """Train this model by shares from now on; RequestError where that can't be."""
    if find_library(model):
        training.follow_averaged(model)
    else:
        training.wrap(model)


def find_fault(model: Any) -> str:
    """Why a model that a library averages stays as it is; empty if each rank computes rows of its
    own, and the ranks' mean is of all gradients.
    """
    match find_library(model):
        case "FSDP2":
            return _find_fsdp2_fault(model)
        case "FSDP1":
            return "FSDP1 takes weights that a check moves for the program's own change"
        case _:
            return "with DeepSpeed it isn't shown that shares change nothing"


def _find_fsdp2_fault(model: Any) -> str:
    kept = [each for each in model.parameters() if isinstance(each, DTensor)]
    if len(kept) < len(list(model.parameters())):
        return "a part of its model isn't sharded, so its gradients are each rank's own"
    for each in kept:
        shards = [place for place in each.placements if not place.is_replicate()]
        if len(shards) > 1 or each.device_mesh.size() != dist.get_world_size():
            return "several ranks compute one row, by tensor parallelism"
    return ""


def run_weighted(training: Any, backward: Any, arguments: Any, keywords: Any) -> Any:
    """Run torch.autograd.backward with the losses of a rank's rows weighted."""
    bound = _signature(backward).bind(*arguments, **keywords)
    losses = _as_list(bound.arguments["tensors"])
    gradients = _as_list(bound.arguments.get("grad_tensors")) or [None] * len(losses)
    bound.arguments["grad_tensors"] = training.weights.weigh_backward(losses, gradients)
    return backward(*bound.args, **bound.kwargs)


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
