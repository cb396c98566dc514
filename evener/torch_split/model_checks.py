"""Checks of a model before it is wrapped, and hooks that notice gradients that nothing weighs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import RequestError
from .wrapped import Exchanged

_ENGINES = {"DeepSpeedEngine": "DeepSpeed", "MegatronEngine": "Megatron-LM", "FullyShardedDataParallel": "FSDP1"}
_frozen_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> handle


def find_wrapper(model: Any) -> Any:
    """The DistributedDataParallel or Exchanged that `model` is, compiled or not, or None.

    RequestError if one lies deeper in it.
    """
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(inner, DistributedDataParallel | Exchanged):
        return inner
    if any(isinstance(module, DistributedDataParallel | Exchanged) for module in model.modules()):
        raise RequestError(
            "A part of the model is in DistributedDataParallel or split.wrap already, and gradients would be exchanged"
            " twice.",
            "Call split.wrap on the whole model before anything else wraps it, or on that part alone.",
        )
    return None


def is_sharded(model: Any) -> bool:
    """True if FSDP2 shards the model's parameters."""
    return "FSDPModule" in _class_names(model)


def has_own_work(model: Any, rebalances: bool) -> bool:
    """True if no rank waits for another within a pass, as they do in FSDP2's layers and in normalization over ranks.

    RequestError if one does, and shares are to follow own work.
    """
    if not (is_sharded(model) or any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())):
        return True
    if rebalances:
        raise RequestError(
            "Ranks meet in layers, by FSDP or SyncBatchNorm, so none has times of its own to rebalance by.",
            "Leave rebalance out, or use DistributedDataParallel and GroupNorm or LayerNorm.",
        )
    return False


def check_sharded(model: Any, weigh: str) -> bool:
    """True if FSDP2 shards the model; RequestError if its gradients are to be weighted."""
    sharded = is_sharded(model)
    if sharded and weigh == "gradients":
        raise RequestError(
            "FSDP shards the model, and its mean over ranks can't be weighted.",
            "Use Split(..., weigh='loss') and split.scale(loss).backward(), which is exact.",
        )
    return sharded


def check_exchange(model: Any) -> None:
    """RequestError if another library exchanges the gradients, or the parts of a row."""
    names = _class_names(model)
    for name, library in _ENGINES.items():
        if name in names:
            raise RequestError(
                f"{library} takes its own mean of gradients over ranks, which a plan can't weigh.",
                "Use DistributedDataParallel, or FSDP2 (fully_shard) with Split(..., weigh='loss').",
            )
    if not is_sharded(model) and any(type(each.data).__name__ == "DTensor" for each in model.parameters()):
        raise RequestError(
            "The model is in tensor parallelism, which puts several ranks on one row.",
            "Use DistributedDataParallel, or FSDP2 (fully_shard) with Split(..., weigh='loss').",
        )


def _class_names(model: Any) -> set[str]:
    return {kind.__name__ for module in model.modules() for kind in type(module).__mro__}


def check_not_inside_ddp() -> None:
    """RequestError in the forward pass of a wrapped model that is a part of another DistributedDataParallel."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RequestError(
            "A model from split.wrap is inside another DistributedDataParallel, which exchanges gradients again.",
            "Wrap it once: after accelerate, model = split.wrap(accelerator.prepare(model)); in Lightning, give"
            " the trainer split.strategy() and leave wrap out.",
        )


def check_normalization(model: Any, weigh: str, world: int, pass_rows: int | None, fewest: int = 2) -> None:
    """Warn of normalization over a device's own rows; RequestError for what mixes the ranks' gradients unweighted.

    `pass_rows` are those of the largest pass, where shares are computed in passes; `fewest` of the smallest in a full
    batch.
    """
    kinds = [type(module) for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    synchronized = any(issubclass(kind, torch.nn.SyncBatchNorm) for kind in kinds)
    if synchronized and world > 1:
        if pass_rows is not None:
            check_passes(model)
        _check_weigh(weigh)
    if kinds and pass_rows is not None:
        warnings.warn(f"Batch normalization sees one pass of {pass_rows} rows, not the whole share.", stacklevel=3)
    if kinds and not synchronized and world > 1:
        warnings.warn(
            f"{kinds[0].__name__} normalizes over each device's own share, so training depends on the split; "
            "SyncBatchNorm (on GPUs), GroupNorm or LayerNorm don't. A short last batch can leave a device a single "
            "row, of which PyTorch takes no statistics: use drop_last=True.",
            stacklevel=3,
        )
    if kinds and fewest < 2:
        warnings.warn(
            "Each batch has a pass of a single row, of which BatchNorm1d takes no statistics, also with drop_last=True:"
            " take another global batch (Split(plan, global_batch=N)), GroupNorm or LayerNorm.",
            stacklevel=3,
        )


def check_passes(model: Any) -> None:
    """RequestError for a model whose ranks meet in each forward pass, of which they have different numbers."""
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        raise RequestError(
            "SyncBatchNorm exchanges statistics in each pass, and the ranks have different numbers of passes.",
            "Use GroupNorm or LayerNorm, or a plan without passes (evener balance --micro off) and no lengths.",
        )


def _check_weigh(weigh: str) -> None:
    if weigh == "gradients":
        raise RequestError(
            "SyncBatchNorm mixes the ranks' gradients before they can be weighted.",
            "Use Split(..., weigh='loss') and split.scale(loss).backward(), which is exact.",
        )


def watch_frozen(model: Any) -> None:
    """Refuse the first gradient of a parameter that is frozen now: DistributedDataParallel won't exchange it."""
    for parameter in model.parameters():
        handle = _frozen_hooks.pop(parameter, None)
        if handle is not None:
            handle.remove()
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.requires_grad_(True)  # else it takes no hook
            _frozen_hooks[parameter] = parameter.register_hook(_refuse_unfrozen)
            parameter.requires_grad_(False)


def _refuse_unfrozen(_: Any) -> None:
    raise RequestError(
        "A layer that was frozen when split.wrap was called is trained, but its gradients aren't exchanged.",
        "Unfreeze layers before split.wrap, or wrap again: model = split.wrap(model.module).",
    )


def check_first_gradient(model: Any, check: Callable[[], None]) -> None:
    """Call `check` in the model's first backward pass, and never again."""
    handles: list[Any] = []

    def hook(_: Any) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        check()

    handles += [parameter.register_hook(hook) for parameter in model.parameters() if parameter.requires_grad]
