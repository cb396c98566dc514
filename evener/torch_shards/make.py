"""A model becomes sharded: its checks, its shares of state, and what weighs its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RequestError
from ..shares.whole_rows import check_ratios
from ..torch_split.collectives import end_with_others, is_equal_everywhere, own_collectives
from ..torch_split.exchange import register
from ..torch_split.planned import PlannedTraining
from ..torch_split.ranks import return_memory
from ..torch_split.retry import advise
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
from .unit import choose_units, count_gathered

_MEET = "meet in each unit of a sharded model"


def shard(
    training: PlannedTraining, model: Any, level: str, units: Any, state: Sequence[float] | None, dtype: Any
) -> Any:
    """The model, sharded over the ranks of a training; as `Split.shard`."""
    if level not in ("all", "state") or (level == "state" and units is not None):
        raise RequestError(
            f"shard={level!r} with units={units!r} isn't a way to shard.",
            "Write 'all' or 'state'; units go with 'all'.",
        )
    check_model(model, training.plan, training.strict)
    if training.world == 1:
        return training.wrap(model)
    _check(training, model)
    chosen = choose_units(model, units) if level == "all" else {}
    parts = _parts(training, state, lambda: count_gathered(model, chosen, dtype))
    place = ShardPlace(training.rank, parts, training.device)
    if not is_equal_everywhere(int(model_digest(model)[:15], 16), training.device):
        raise RequestError("The ranks shard different models.", "Make the same model on every rank.")
    training.weights.adopt(model, cut_model(model, chosen, place, dtype, level == "state"), training.device)
    training.passes.final = (f"ranks {_MEET}", "Make a plan with smaller passes: evener balance --micro.")
    advise(
        f"ranks {_MEET}, so no pass is computed again: take smaller ones, or give this rank a smaller part by state=."
    )
    training.timer.has_own_work = False
    if place.on_nccl:
        end_with_others(training.device)
    return model


def cut_model(
    model: Any, units: Mapping[str, Any], place: ShardPlace, dtype: Any = None, keeps: bool = False
) -> Sharded:
    """Cut a model over the ranks of `place`: from now on its parameters are this rank's pieces."""
    if place.device.type == "cpu":
        return_memory()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(place.device)
    replaced = list(model.parameters())
    sharded = Sharded(model, units, place, dtype, keeps)
    look_after(sharded, replaced)
    register(sharded)
    model.exchange, model.require_backward_grad_sync = sharded, True
    if keeps:
        model.no_sync = partial(_no_sync, model)
    model.register_state_dict_pre_hook(_refuse)
    model.register_load_state_dict_pre_hook(_refuse)
    return sharded


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Backward passes in here leave their sum to a later one."""
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, False
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def _check(training: PlannedTraining, model: Any) -> None:
    """RequestError for what can't be combined with shards."""
    check_normalization(model, training.weights.weigh, training.world, None)
    check_exchange(model)
    if find_wrapper(model) is not None or is_sharded(model) or hasattr(model, "_orig_mod"):
        raise RequestError(
            "The model is wrapped or compiled already.", "Give split.shard the model itself, as it was made."
        )
    meets, sums = f"ranks {_MEET}", "gradients are summed a unit at a time, in each pass"
    for wanted, name, why in (
        (training.rebalancing, "rebalance", meets),
        (training.noise, "noise", sums),
        (training.guards, "guard", meets),
    ):
        if wanted:
            raise RequestError(f"split.shard has no {name}: {why}.", f"Leave {name} out.")


def _parts(training: PlannedTraining, state: Sequence[float] | None, beside: Callable[[], int]) -> tuple[float, ...]:
    """The part of the state that each rank holds: as said, as planned, or as memory is left beside gathered units."""
    planned = tuple(share.state for share in training.shares.shares)
    parts = tuple(state or ()) or (planned if all(planned) else _by_memory(training, beside()))
    check_ratios(parts)
    if len(parts) != training.world or not all(parts):
        raise RequestError(
            f"state= has {len(parts)} parts for {training.world} ranks.", "Give each rank a part above 0."
        )
    return parts


def _by_memory(training: PlannedTraining, beside: int) -> tuple[float, ...]:
    """The bytes of each GPU that are left to state; equal parts on CPUs, whose memory ranks share."""
    own = 1.0
    if training.device.type == "cuda":
        allowed = torch.cuda.get_per_process_memory_fraction(training.device)
        own = max(1.0, allowed * torch.cuda.mem_get_info(training.device)[1] - beside)
    every = [torch.zeros(1, dtype=torch.float64, device=training.device) for _ in range(training.world)]
    with own_collectives():
        dist.all_gather(every, torch.tensor([own], dtype=torch.float64, device=training.device))
    return tuple(map(float, every))


def _refuse(*_: Any) -> None:
    raise RequestError(
        "A sharded model's parameters are pieces of its own.",
        "Use split.model_state(model), split.save and split.load.",
    )
