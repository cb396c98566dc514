"""Programs that sharded models refuse, and the errors with which they end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evener.torch import Split
from tests.support.last_words import last_words
from tests.support.torch_shard_programs import (
    ROWS,
    SHARES,
    Packed,
    PackedLinear,
    ShardCase,
    data,
    last_sentence,
    make_model,
    make_split,
    objective,
    start,
    step_once,
)


def with_old_optimizer(split: Split, model: Any) -> None:
    update = torch.optim.SGD(model.parameters(), 0.1)
    step_once(split, split.shard(model), update)


def with_whole_optimizer(split: Split, model: Any) -> None:
    model = split.shard(model)
    step_once(split, model, torch.optim.Adafactor(model.parameters()))


class CentredSGD(torch.optim.SGD):
    """An optimizer that needs whole gradients before torch's step."""

    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            each.grad.sub_(each.grad.mean())
        return super().step(closure)


def with_own_step(split: Split, model: Any) -> None:
    model = split.shard(model)
    step_once(split, model, CentredSGD(model.parameters(), 0.1))


def with_second_gradients(split: Split, model: Any) -> None:
    model = split.shard(model)
    for inputs, labels in split.loader(data()):
        objective(model.case, model, inputs, labels).backward(create_graph=True)


def with_input_penalty(split: Split, model: Any) -> None:
    """Penalizes the gradient of an intermediate value, so parameters get no gradients."""
    kept: list[torch.Tensor] = []
    model.words.register_forward_hook(lambda _, __, rows: kept.append(rows))
    model = split.shard(model)
    for inputs, labels in split.loader(data()):
        torch.autograd.grad(
            objective(model.case, model, inputs, labels), kept[-1], create_graph=True
        )


class Opaque:
    """An object with a tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


def with_opaque_outputs(split: Split, model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda _, __, rows: Opaque(rows))
    step_once(split, split.shard(model), None)


def with_large_buffers(split: Split, model: Any) -> None:
    """Stores weights in buffers, like the layers of GPTQ and AWQ."""
    model.register_buffer("qweight", torch.zeros(100_000, dtype=torch.int32))
    split.shard(model)


def with_trained_bytes(split: Split, model: Any) -> None:
    layer = model.blocks[0].up = PackedLinear(model.blocks[0].up)
    packed = layer.weight
    layer.weight = Packed(packed.double(), requires_grad=True)
    layer.weight.quant_state, layer.weight.bnb_quantized = packed.quant_state, True
    split.shard(model)


def counted(split: Split, model: Any) -> None:
    model = split.shard(model)
    for inputs, labels in split.loader(data()):
        objective(model.case, model, inputs, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, 0.0)


def with_late_freeze(split: Split, model: Any) -> None:
    split.shard(model).head.requires_grad_(False)
    step_once(split, model, torch.optim.SGD(model.parameters(), 0.1))


def with_copy(split: Split, model: Any) -> None:
    copy.deepcopy(split.shard(model))


def with_state(split: Split, model: Any) -> None:
    split.shard(model).state_dict()


def with_optimizer_state(split: Split, model: Any) -> None:
    update = torch.optim.SGD(split.shard(model).parameters(), 0.1, momentum=0.9)
    step_once(split, model, update)
    update.state_dict()


def wrapped(split: Split, model: Any) -> None:
    split.shard(split.wrap(model))


def with_wrong_parts(split: Split, model: Any) -> None:
    split.shard(model, state=[1.0, 0.0, 1.0])


def with_no_unit(split: Split, model: Any) -> None:
    split.shard(model, units=torch.nn.Conv2d)


def compiled(split: Split, model: Any) -> None:
    torch.compile(split.shard(model), backend="eager")(torch.zeros(1, 2, dtype=torch.int64))


def by_length(split: Split, model: Any) -> None:
    model = split.shard(model)
    for batch in split.loader(data(), lengths=list(range(1, ROWS + 1))):
        for part in split.parts(batch):
            part.backward(objective(model.case, model, *part.batch))


def wrapped_after(split: Split, model: Any) -> None:
    """Wraps another model after sharding one, which is allowed, and then the sharded model."""
    model = split.shard(model)
    split.wrap(torch.nn.Linear(2, 2))
    split.wrap(model)


def with_state_and_units(split: Split, model: Any) -> None:
    split.shard(model, shard="state", units=torch.nn.Linear)


def without_a_sum(split: Split, model: Any, clears: bool = False) -> None:
    """Steps right after an accumulated batch, or clears its gradients and goes on."""
    model = split.shard(model, shard="state")
    update = torch.optim.SGD(model.parameters(), 0.1)
    step_once(split, model, update)
    for inputs, labels in split.loader(data()):
        with split.no_sync(model):
            objective(model.case, model, inputs, labels).backward()
        update.zero_grad(set_to_none=split.rank == 1) if clears else update.step()


def cleared_before_a_sum(split: Split, model: Any) -> None:
    without_a_sum(split, model, clears=True)


def _run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def out_of_memory(split: Split, model: Any) -> None:
    model = split.shard(model)
    for batch in split.loader(data()):
        for part in split.parts(batch):
            with part:
                raise torch.OutOfMemoryError("CUDA out of memory.")


REFUSED: dict[str, tuple[str, Callable[[Split, Any], None]]] = {
    "an optimizer from before": ("Make the optimizer after split.shard", with_old_optimizer),
    "an optimizer of whole parameters": (
        "Adafactor looks at whole parameters",
        with_whole_optimizer,
    ),
    "an optimizer with a step of its own": ("CentredSGD looks at whole parameters", with_own_step),
    "gradients of gradients": ("Leave create_graph out", with_second_gradients),
    "a penalty on gradients": ("Leave create_graph out", with_input_penalty),
    "outputs in an object": (
        "blocks.1 returns a Opaque, whose tensors can't be seen",
        with_opaque_outputs,
    ),
    "norm 0": ("Clip by another norm", counted),
    "frozen later": ("Do that before split.shard", with_late_freeze),
    "large buffers": ("buffers aren't cut", with_large_buffers),
    "trained bytes": ("bytes have no gradients", with_trained_bytes),
    "a copy": ("can't be copied", with_copy),
    "state_dict": ("split.model_state", with_state),
    "an optimizer's state_dict": ("split.optimizer_state", with_optimizer_state),
    "a wrapped model": ("wrapped or compiled already", wrapped),
    "a sharded model, wrapped": ("Leave split.wrap out", wrapped_after),
    "a rank without state": ("Give each rank a part above 0", with_wrong_parts),
    "units of no module": ("Give classes of its blocks", with_no_unit),
    "units of the state alone": ("units go with 'all'", with_state_and_units),
    "a step without a sum": (
        "Leave the last backward pass before each step out of no_sync",
        without_a_sum,
    ),
    "cleared before a sum": (
        "Call zero_grad() after the optimizer's step alone",
        cleared_before_a_sum,
    ),
    "torch.compile": ("can't be compiled", compiled),
    "rows by length": ("Leave lengths out", by_length),
    "out of memory": ("ranks meet in each unit of a sharded model", out_of_memory),
}


def refuse(program: Callable[[Split, Any], None], world: int) -> str:
    """Return the error with which a program ends."""
    return last_sentence(
        lambda: program(make_split(ShardCase(), SHARES[world]), make_model(ShardCase()))
    )


def leave(folder: Path, rank: int) -> None:
    """Save what a rank prints when the second one runs out of memory in a block."""
    torch.set_num_threads(1)
    split, model, said = *start(ShardCase(), 2), ""
    if rank == 1:
        model.blocks[1].register_forward_hook(_run_out)
    try:
        step_once(split, model, torch.optim.SGD(model.parameters(), 0.1))
    except RuntimeError as error:
        said = last_words(error)
    torch.save(said, folder / f"{rank}.pt")
