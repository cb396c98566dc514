"""Shard a model, and make gradient clipping, GradScaler and optimizers work with its shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import optim
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import RequestError
from ...shares.whole_rows import check_ratios
from ..hooks import ProcessHooks, Replacement
from ..packed import pack_weights
from ..planned import PlannedTraining
from ..private import TOTAL_NORM, UNSCALE, grow_segments, own_buffers, unwrap_compiled
from ..ranks.ranks import return_memory
from ..step.wrapped import (
    Exchanged,
    check_exchange,
    check_model,
    check_normalization,
    find_wrapper,
    is_sharded,
    model_digest,
)
from ..sums.collectives import is_equal_everywhere, own_collectives
from ..sums.exchange import EXCHANGES
from .place import ShardRank
from .sender import bound_received
from .sharded import Sharded
from .slot import byte_count
from .unit import choose_units
from .whole import estimate_gathered_bytes

_MEET = "meet in each unit of a sharded model"
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
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that were replaced with pieces
_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()
_counted: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose state the ledger counts


def shard(
    training: PlannedTraining,
    model: Any,
    level: str,
    units: Any,
    state: Sequence[float] | None,
    dtype: Any,
    autocast_dtype: Any = None,
) -> Any:
    """Shard a model over the ranks of a training run, and return it.

    Arguments:

    - `level`: how sharded parameters are gathered for computation: "all" gathers one unit at a
      time, "state" the whole model at once.
    - `units`: modules whose parameters are gathered together, with level "all"; None chooses
      repeated blocks and large layers.
    - `state`: relative size of each rank's part of the model; by default from the plan, else in
      proportion to free memory.
    - `dtype`: dtype of computation; None leaves each parameter its own.
    - `autocast_dtype`: dtype of an autocast around each forward pass, or None.

    Every rank has to call this. Raises RequestError if the model or the training can't be sharded,
    or if the ranks' models differ.
    """
    if level not in ("all", "state") or (level == "state" and units is not None):
        raise RequestError(
            f"shard={level!r} with units={units!r} isn't a way to shard.",
            "Write 'all' or 'state'; units go with 'all'.",
        )
    check_model(model, training.plan, training.strict)
    if training.world == 1:
        return training.wrap(model)
    _check_supported(training, model)
    pack_weights(model, training.device)
    check_buffers(model)
    chosen = choose_units(model, units) if level == "all" else {}
    received = bound_received(training.world)

    def count_other_bytes() -> int:
        return estimate_gathered_bytes(
            model, chosen, dtype, autocast_dtype, received if level == "all" else None
        )

    parts = _choose_parts(training, state, count_other_bytes)
    rows = training.ranks.batches
    first = next(rank for rank, own in enumerate(rows) if own)
    place = ShardRank(training.rank, parts, training.device, first=first)
    if not is_equal_everywhere(int(model_digest(model)[:15], 16), training.device):
        raise RequestError(
            "The ranks shard different models.", "Make the same model on every rank."
        )
    sharded = cut_model(model, chosen, place, dtype, level == "state", autocast_dtype)
    if not rows[training.rank]:
        sharded.compute_nothing()
    training.weights.weigh_sharded(model, sharded, training.device)
    training.passes.recovery.final = (
        f"ranks {_MEET}",
        "Make a plan with smaller passes: evener balance --micro.",
    )
    training.passes.recovery.advice = (
        f"ranks {_MEET}, so no pass is computed again: take smaller ones, or give this "
        f"rank a smaller part by state=."
    )
    training.timer.can_time_compute = False
    return model


def cut_model(
    model: Any,
    units: Mapping[str, Any],
    place: ShardRank,
    dtype: Any = None,
    keeps_gradients: bool = False,
    autocast_dtype: Any = None,
) -> Sharded:
    """Replace each parameter of a model with this rank's piece of it.

    Arguments:

    - `units`: modules whose parameters are gathered together, by name.
    - `place`: this rank, and the size of each rank's part.
    - `dtype`: dtype of computation; None leaves each parameter its own.
    - `keeps_gradients`: whether to accumulate unsharded gradients over passes and reduce them once
      per batch.
    - `autocast_dtype`: dtype of an autocast around each forward pass, or None.

    Returns the Sharded object that gathers and frees the model's parameters.
    """
    if place.device.type == "cpu":
        return_memory()
    elif place.device.type == "cuda":
        grow_segments(place.device.index or 0)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            own_buffers(module)[name] = buffer.to(place.device)
    before = list(model.parameters())
    sharded = Sharded(model, units, place, dtype, keeps_gradients, autocast_dtype)
    kept = set(map(id, model.parameters()))
    include_all_ranks(sharded, [each for each in before if id(each) not in kept])
    EXCHANGES.add(sharded)
    model.exchange, model.require_backward_grad_sync = sharded, True
    if keeps_gradients or sharded.whole is not None:
        model.no_sync = partial(Exchanged.no_sync, model)
    model.register_state_dict_pre_hook(_refuse)
    model.register_load_state_dict_pre_hook(_refuse)
    return sharded


def trains_shards_only(model: Any) -> bool:
    """Return whether every trained parameter of the model is sharded."""
    # gradients are then reduced unit by unit, and no rank has the gradient of a few rows
    sharded = getattr(model, "exchange", None)
    return isinstance(sharded, Sharded) and sharded.whole is None


def _check_supported(training: PlannedTraining, model: Any) -> None:
    """Raise a RequestError if the model can't be sharded with the training run's options."""
    check_normalization(model, training.weights.weigh, training.world)
    check_exchange(model)
    if find_wrapper(model) is not None or is_sharded(model) or unwrap_compiled(model) is not model:
        raise RequestError(
            "The model is wrapped or compiled already.",
            "Give split.shard the model itself, as it was made.",
        )
    wanted = {"rebalance": training.rebalancing, "noise": training.noise}
    for name in filter(wanted.get, wanted):
        why = (
            "gradients are summed a unit at a time, in each pass"
            if name == "noise"
            else f"ranks {_MEET}"
        )
        raise RequestError(f"split.shard has no {name}: {why}.", f"Leave {name} out.")


def check_buffers(model: Any) -> None:
    """Raise a RequestError if a model has more bytes in buffers than in parameters.

    Buffers aren't sharded, so each device would hold all of them.
    """
    in_buffers = sum(map(byte_count, model.buffers()))
    if in_buffers > sum(map(byte_count, model.parameters())):
        raise RequestError(
            f"{in_buffers / 2**20:,.0f} MiB of the model are in buffers, as GPTQ's and AWQ's "
            f"weights are, and buffers aren't cut: each device would hold them all.",
            "Quantize it with bitsandbytes' 4 bits, or load it in bfloat16.",
        )


def _choose_parts(
    training: PlannedTraining, state: Sequence[float] | None, count_other_bytes: Callable[[], int]
) -> tuple[float, ...]:
    """Choose the relative size of each rank's part of the model.

    The sizes come from `state`, or else from the plan. If the plan has none, they are in proportion
    to the free memory of each rank, minus the bytes that `count_other_bytes` returns. Raises
    RequestError unless each rank has a part above 0.
    """
    planned = tuple(share.state for share in training.ranks.shares)
    parts = tuple(state or ()) or (
        planned if all(planned) else _free_bytes_by_rank(training, count_other_bytes())
    )
    check_ratios(parts)
    if len(parts) != training.world or not all(parts):
        raise RequestError(
            f"state= has {len(parts)} parts for {training.world} ranks.",
            "Give each rank a part above 0.",
        )
    return parts


def _free_bytes_by_rank(training: PlannedTraining, other_bytes: int) -> tuple[float, ...]:
    """Return how many bytes each rank's GPU has left for its part of the model.

    The result is used as the relative sizes of parts. For a rank on a CPU, it is 1, so that ranks
    on CPUs get equal parts. `other_bytes` is how many bytes a rank needs for other things. Every
    rank has to call this.
    """
    # ranks on CPUs share their host's memory, so they get equal parts
    own = 1.0
    if training.device.type == "cuda":
        allowed = torch.cuda.get_per_process_memory_fraction(training.device)
        own = max(1.0, allowed * torch.cuda.mem_get_info(training.device)[1] - other_bytes)
    every = [
        torch.zeros(1, dtype=torch.float64, device=training.device) for _ in range(training.world)
    ]
    with own_collectives():
        dist.all_gather(every, torch.tensor([own], dtype=torch.float64, device=training.device))
    return tuple(map(float, every))


def _refuse(*_: Any) -> None:
    raise RequestError(
        "A sharded model's parameters are pieces of its own.",
        "Use split.model_state(model), split.save and split.load.",
    )


def include_all_ranks(sharded: Sharded, replaced: Iterable[Any]) -> None:
    """Make gradient clipping and GradScaler consider the shards of all ranks.

    `replaced` are the parameters that the model had before sharding.
    """
    _all.add(sharded)
    _replaced.update((each, True) for each in replaced)
    _HOOKS.hold(sharded)


def _make_total_norm(own: Callable[..., Any]) -> Callable[..., Any]:
    def total_norm(tensors: Any, norm_type: float = 2.0, *options: Any, **named: Any) -> Any:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return sum_norms(own, listed, float(norm_type), *options, **named)

    return total_norm


def _make_unscale(own: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_on_all(scaler: Any, optimizer: Any, *arguments: Any) -> Any:
        found = own(scaler, optimizer, *arguments)
        if find(optimizer) is not None:  # a rank sees overflows only in its shard
            for each in found.values():
                _reduce(each, dist.ReduceOp.MAX)
        return found

    return unscale_on_all


def _register() -> list[Any]:
    return [
        Replacement(clip_grad, TOTAL_NORM, _make_total_norm),
        Replacement(torch.nn.utils, "get_total_norm", _make_total_norm),
        Replacement(torch.amp.GradScaler, UNSCALE, _make_unscale),
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(_after_step),
    ]


_HOOKS = ProcessHooks(_register)


def sum_norms(
    norm: Callable[..., Any], tensors: list[Any], order: float, *options: Any, **named: Any
) -> Any:
    """Return the total norm of gradients, some of which are sharded over ranks.

    Every rank has to call this. `norm` is PyTorch's own function for the total norm, and `order` is
    the order of the norm. Raises RequestError for order 0, and RuntimeError if `error_if_nonfinite`
    is set and the norm isn't finite.
    """
    shards = _list_shard_gradients()
    own = [tensor for tensor in tensors if id(tensor) in shards]
    if not own:
        return norm(tensors, order, *options, **named)
    if order == 0:
        raise RequestError(
            "norm_type=0 counts tensors, and ranks have pieces of them.", "Clip by another norm."
        )
    strict = options[0] if options else named.pop("error_if_nonfinite", False)
    total = _sum_shard_norms(norm, own, order)
    rest = [tensor for tensor in tensors if id(tensor) not in shards]
    if rest:
        total = norm([total, *rest], order)
    if strict and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of the gradients is {float(total)}, so they can't be clipped."
        )
    return total


def _list_shard_gradients() -> set[int]:
    """Return the ids of this rank's gradients that are only pieces of a parameter's gradient."""
    parameters = [piece for sharded in _all for piece in sharded.pieces]
    return {id(parameter.grad) for parameter in parameters if parameter.grad is not None}


def _sum_shard_norms(norm: Callable[..., Any], own: list[Any], order: float) -> torch.Tensor:
    """Return the norm over all ranks of sharded gradients.

    `norm` is PyTorch's own function for the total norm, `own` has this rank's pieces of the
    gradients, and `order` is the order of the norm.
    """
    parts = [each for each in own if each.numel()]
    total = _norm_over_ranks(norm(parts, order) if parts else None, order, own[0].device)
    return total.to(reduce(torch.promote_types, {each.dtype for each in own}))


def _norm_over_ranks(own: torch.Tensor | None, order: float, device: Any) -> torch.Tensor:
    """Combine the norms of all ranks' pieces into one norm.

    `own` is the norm of this rank's pieces, or None if this rank has no elements. `order` is the
    order of the norm.
    """
    # summed in float64, because powers of half-precision values overflow
    if order in (float("inf"), float("-inf")):
        nothing = torch.full((), max(0.0, -order), device=device, dtype=torch.float64)
        total = nothing if own is None else own.double()
        _reduce(total, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN)
        return total
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    total = nothing if own is None else own.double() ** order
    _reduce(total, dist.ReduceOp.SUM)
    return total ** (1 / order)


def _reduce(tensor: torch.Tensor, operation: Any) -> None:
    if not dist.is_initialized():
        return  # this rank is measured without other ranks
    with own_collectives():
        dist.all_reduce(tensor, operation)


def move(optimizer: Any, replaced: Iterable[Any], model: Any) -> None:
    """Make an optimizer train this rank's pieces of a sharded model instead of the old parameters.

    `replaced` are the old parameters, in the order of `model.parameters()`. Raises RequestError if
    the optimizer already has state.
    """
    if optimizer.state:
        raise RequestError(
            f"{type(optimizer).__name__} has state before its first step, of the whole model.",
            "Use AdamW or SGD.",
        )
    now = dict(zip(map(id, replaced), model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]


def find(optimizer: Any) -> Sharded | None:
    """Return the Sharded object of the model that an optimizer trains, or None."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next((each for each in _all if not trained.isdisjoint(map(id, each.parameters))), None)


def trains_pieces(optimizer: Any) -> bool:
    """Return whether an optimizer trains this rank's piece of any sharded parameter."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(not trained.isdisjoint(map(id, each.pieces)) for each in _all)


def _before_step(optimizer: Any, _: Any, __: Any) -> None:
    sharded = find(optimizer)
    if sharded is not None and sharded.waits:
        raise RequestError(
            "Gradients weren't summed before the optimizer's step: the last backward pass was "
            "under no_sync.",
            (
                "Leave the last backward pass before each step out of no_sync, also at the end of "
                "an epoch."
            ),
        )
    if optimizer not in _looked_at:
        _check_optimizer(optimizer, sharded)


def _check_optimizer(optimizer: Any, sharded: Sharded | None) -> None:
    """Raise a RequestError if an optimizer can't train the pieces of a sharded model.

    It can't if its steps need whole parameters, or if it was created before sharding.
    """
    if any(
        parameter in _replaced for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise RequestError(
            "The optimizer has the model's parameters from before split.shard, which are no "
            "longer trained.",
            "Make the optimizer after split.shard.",
        )
    if sharded is not None:
        steps = unwrap(type(optimizer).step)
        if trains_pieces(optimizer) and steps not in {unwrap(kind.step) for kind in ELEMENTWISE}:
            raise RequestError(
                f"{type(optimizer).__name__} looks at whole parameters, and a sharded model's "
                f"ranks have pieces.",
                (
                    "Use AdamW, SGD or another of torch.optim whose steps are taken element by "
                    "element."
                ),
            )
        if trains_pieces(optimizer):
            optimizer.register_state_dict_pre_hook(_refuse_state)
    _looked_at.add(optimizer)


def _after_step(optimizer: Any, _: Any, __: Any) -> None:
    sharded = find(optimizer)
    if sharded is not None and optimizer not in _counted:
        _counted.add(optimizer)
        sharded.note_state(optimizer)


def _refuse_state(_: Any) -> None:
    raise RequestError(
        "An optimizer's state is of this rank's shard.", "Use split.optimizer_state or split.save."
    )
