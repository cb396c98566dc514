"""Unequal shares for models whose gradients are averaged over ranks by FSDP or DeepSpeed.

Each rank's loss is multiplied by `rows * ranks / all rows` before its backward pass. Then the mean
over ranks equals the mean over all rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from math import prod
from typing import Any

import torch.distributed as dist

from ..torch.private import ignores_parameters
from ..torch.step import unowned
from ..torch.step.weights import Weigh
from ..torch.step.wrapped import is_sharded

SEVERAL = "several ranks compute one row, by tensor, pipeline or sequence parallelism"
# DeepSpeed's optimizers that accumulate compression errors on each rank
COMPRESSED = ("onebitadam", "zerooneadam", "onebitlamb")
IGNORED = "a part of its model isn't sharded, so its gradients are each rank's own"
_LIBRARIES = {"FullyShardedDataParallel": "FSDP1", "DeepSpeedEngine": "DeepSpeed"}


def find_library(model: Any) -> str:
    """Return "FSDP1", "FSDP2" or "DeepSpeed", or "" if the model isn't sharded by any of them."""
    if is_sharded(model):
        return "FSDP2"
    names = {kind.__name__ for kind in type(model).__mro__}
    return next((library for name, library in _LIBRARIES.items() if name in names), "")


def has_copies(models: Iterable[Any]) -> bool:
    """Return whether the optimizer trains copies of the models' parameters, as DeepSpeed's does."""
    return any(find_library(model) == "DeepSpeed" for model in models)


def trains_others(optimizer: Any, models: Iterable[Any]) -> bool:
    """Return whether the optimizer also trains parameters that aren't in any of `models`.

    The result is False with DeepSpeed, whose optimizers can't be checked.
    """
    return not has_copies(models) and unowned.trains_others(optimizer, models)


def choose_weighted(models: Iterable[Any]) -> Weigh:
    """Return what a rank multiplies by its weight: "loss" for sharded models, else "gradients"."""
    return "loss" if any(map(find_library, models)) else "gradients"


def name_wrapper(models: Iterable[Any]) -> str:
    """Return which wrapper trains the models, such as "FSDP2" or "DistributedDataParallel"."""
    return next(filter(None, map(find_library, models)), "DistributedDataParallel")


def follow(training: Any, model: Any) -> None:
    """From now on, weight a model's losses or gradients by this rank's share.

    Raises RequestError if this model can't be weighted.
    """
    if find_library(model):
        training.follow_averaged(model)
    else:
        training.wrap(model)


def find_fault(model: Any) -> str:
    """Return why a sharded model can't train with unequal shares, or "" if it can."""
    # a model can if each rank computes its own rows, and the library averages all gradients over
    # ranks
    match find_library(model):
        case "FSDP2":
            return _find_fsdp2_fault(model)
        case "FSDP1":
            return _find_fsdp1_fault(model)
        case _:
            return _find_deepspeed_fault(model)


def _find_fsdp2_fault(model: Any) -> str:
    # half a second of CPU for programs without FSDP2, whose library has imported it already
    from torch.distributed.tensor import DTensor

    kept = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if len(kept) < len(list(model.parameters())):
        return IGNORED
    for each in kept:
        shards = [place for place in each.placements if not place.is_replicate()]
        if len(shards) > 1 or each.device_mesh.size() != dist.get_world_size():
            return SEVERAL
    return ""


def _find_fsdp1_fault(model: Any) -> str:
    groups = model.process_group
    ranks = [dist.get_world_size(each) for each in _as_list(groups)]
    if prod(ranks) != dist.get_world_size():
        return "its model is trained by some of the processes only"
    return IGNORED if ignores_parameters(model) else ""


def _find_deepspeed_fault(engine: Any) -> str:
    if engine.dp_world_size != dist.get_world_size():
        return SEVERAL
    if engine.has_moe_layers:
        return "its experts compute rows of other ranks"
    if engine.optimizer_name() in COMPRESSED:
        return "its optimizer compresses each rank's gradients before they are averaged"
    return ""


def run_weighted(training: Any, backward: Any, arguments: Any, keywords: Any) -> Any:
    """Run a backward pass whose losses are multiplied by this rank's weight."""
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
