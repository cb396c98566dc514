"""A model becomes sharded: its checks, its shares of state, and what weighs its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RequestError
from ..shares.whole_rows import check_ratios
from ..torch_split.collectives import is_equal_everywhere
from ..torch_split.exchange import register
from ..torch_split.planned import PlannedTraining
from ..torch_split.wrapped import (
    check_exchange,
    check_model,
    check_normalization,
    find_wrapper,
    is_sharded,
    model_digest,
)
from .flat import ShardPlace
from .optimizers import look_after
from .sharded import Sharded
from .units import choose_units


def shard(training: PlannedTraining, model: Any, units: Any, state: Sequence[float] | None, dtype: Any) -> Any:
    """The model, sharded over the ranks of a training; as `Split.shard`."""
    check_model(model, training.plan, training.strict)
    if training.world == 1:
        return training.wrap(model)
    _check(training, model)
    place = ShardPlace(training.rank, _parts(training, state), training.device)
    if not is_equal_everywhere(int(model_digest(model)[:15], 16), training.device):
        raise RequestError("The ranks shard different models.", "Make the same model on every rank.")
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(training.device)
    replaced = list(model.parameters())
    sharded = Sharded(model, choose_units(model, units), place, dtype)
    look_after(sharded, replaced)
    register(sharded)
    model.exchange, model.require_backward_grad_sync = sharded, True
    model.register_state_dict_pre_hook(_refuse)
    model.register_load_state_dict_pre_hook(_refuse)
    training.weights.adopt(model, sharded, training.device)
    training.passes.final = (
        "ranks meet in each unit of a sharded model",
        "Make a plan with smaller passes: evener balance --micro.",
    )
    training.timer.has_own_work = False
    return model


def _check(training: PlannedTraining, model: Any) -> None:
    """RequestError for what can't be combined with shards."""
    check_normalization(model, training.weights.weigh, training.world, None)
    check_exchange(model)
    if find_wrapper(model) is not None or is_sharded(model) or hasattr(model, "_orig_mod"):
        raise RequestError(
            "The model is wrapped or compiled already.", "Give split.shard the model itself, as it was made."
        )
    for wanted, name in ((training.rebalancing, "rebalance"), (training.noise, "noise"), (training.guards, "guard")):
        if wanted:
            raise RequestError(f"split.shard has no {name}: ranks meet in each unit.", f"Leave {name} out.")


def _parts(training: PlannedTraining, state: Sequence[float] | None) -> tuple[float, ...]:
    """The part of the state that each rank holds."""
    parts = tuple(state) if state is not None else (1.0,) * training.world
    check_ratios(parts)
    if len(parts) != training.world or not all(parts):
        raise RequestError(
            f"state= has {len(parts)} parts for {training.world} ranks.", "Give each rank a part above 0."
        )
    return parts


def _refuse(*_: Any) -> None:
    raise RequestError(
        "A sharded model's parameters are pieces of its own.",
        "Use split.model_state(model), split.save and split.load.",
    )
