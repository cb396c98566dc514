"""What ranks of sharded models learn and see."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open

from evener.torch.shards import checkpoint as checkpoint_module
from evener.torch.shards.make import shard
from evener.torch.shards.unit import choose_units
from evener.torch.shards.whole import estimate_gathered_bytes
from evener.torch.sums.collectives import count_exchanges
from tests.support.fewer_audits import audit_first_step
from tests.support.torch_shard_programs import (
    CASES,
    PARTS,
    SAVED,
    SHARES,
    ShardCase,
    compute,
    data,
    finish,
    last_sentence,
    make_model,
    make_optimizer,
    make_split,
    objective,
    start,
    step_once,
    train,
    train_and_save,
    train_on,
)
from tests.support.torch_shard_refusals import REFUSED, refuse

_broadcast = torch.distributed.broadcast
_all_to_all = torch.distributed.all_to_all_single
RATE = 0.1  # the learning rate under autocast


class LateCopy:
    """A broadcast whose values arrive only in wait(), as gloo's do on a GPU."""

    def __init__(self, tensor: torch.Tensor, source: int, async_op: bool) -> None:
        self._tensor, self._sent = tensor, tensor.clone()
        self._work = _broadcast(self._sent, source, async_op=async_op)

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            self._tensor.copy_(self._sent)


def train_with_late_copies(world: int) -> dict[str, Any]:
    split, model = start(LATE, world)
    update, norms = make_optimizer(LATE, model), list[float]()
    torch.distributed.broadcast = lambda tensor, source, async_op=False: (
        LateCopy(tensor, source, async_op) if async_op else _broadcast(tensor, source)
    )
    for step, batch in enumerate(split.loader(data(), seed=2)):
        compute(LATE, split, model, batch)
        norms.append(finish(LATE, step, model, update))
    torch.distributed.broadcast = _broadcast
    return {"norms": norms}


LATE = ShardCase(clip=0.1)


HALF = ShardCase("momentum")


def train_in_half(world: int) -> dict[str, Any]:
    """Train in bfloat16 on float32 shards.

    Returns the weights, the dtypes of shards and of computation, and the highest number of bytes.
    """
    case = HALF
    split, model, seen = make_split(case, SHARES[world]), make_model(case).float(), set[Any]()
    model = split.shard(model, state=PARTS[world], dtype=torch.bfloat16)
    model.blocks[1].up.register_forward_hook(
        lambda module, _, outputs: seen.update((module.weight.dtype, outputs.dtype))
    )
    update = make_optimizer(case, model)
    for step, batch in enumerate(split.loader(data(), seed=2)):
        compute(case, split, model, batch)
        finish(case, step, model, update)
    types = {each.dtype for each in model.parameters()}, seen
    return {"weights": split.model_state(model), "types": types}


class Blocks(torch.nn.Module):
    """Eight equal layers, each of which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows).relu()
        return rows


def hold_half(world: int) -> tuple[int, float]:
    """Return the most bytes that this rank held in a step of bfloat16 on float32 shards, and the
    bytes that it was expected to hold.

    Its parameters and gradients are counted, and an optimizer with no state.
    """
    split, model = make_split(HALF, SHARES[world]), Blocks()
    part = PARTS[world][split.rank] / sum(PARTS[world])
    units, received = choose_units(model, None), (world - 1) * part
    beside = estimate_gathered_bytes(model, units, torch.bfloat16, received=received)
    parameters = sum(each.nbytes for each in model.parameters())
    model = split.shard(model, state=PARTS[world], dtype=torch.bfloat16)
    split.begin(SHARES[world])
    model(torch.ones(split.shares[split.rank], 64)).sum().backward()
    # of the second unit and of the first, which has no next one: its own and other units' gradients
    second = part * parameters * (1 + 6 / 8)
    first = part * parameters * (1 + 7 / 8) - parameters / 8 / 2
    return model.exchange.ledger.peak, beside + max(first, second)


def train_under_autocast(world: int) -> dict[str, Any]:
    """Train with autocast to bfloat16.

    Returns parameters whose values differ from one process's when blocks compute, the weights after
    the first step, and the number of collective operations in the second step, with the bytes of
    gradients that they send.
    """
    split, model = make_split(HALF, SHARES[world]), make_model(HALF).float()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(generator=generator)
    expected = {name: each.detach().clone() for name, each in model.named_parameters()}
    model = shard(split, model, "all", None, PARTS[world], None, torch.bfloat16)
    wrong: list[str] = []

    def compare(name: str, block: Any, *_: Any) -> None:
        for own, each in block.named_parameters(f"blocks.{name}"):
            values = expected[own]
            values = values.bfloat16() if ".up" in own or ".down" in own else values
            if each.dtype != values.dtype or not torch.equal(each, values):
                wrong.append(own)

    hooks = [
        block.register_forward_pre_hook(partial(compare, name))
        for name, block in model.blocks.named_children()
    ]
    update, counts = torch.optim.SGD(model.parameters(), RATE), list[int]()
    weights: list[dict[str, torch.Tensor]] = []
    sent: list[int] = []

    def count_bytes(received: Any, block: torch.Tensor, *given: Any, **named: Any) -> Any:
        sent.append(block.nbytes)
        return _all_to_all(received, block, *given, **named)

    for batch in islice(split.loader(data(), seed=2), 2):
        before = sum(count_exchanges().values())
        torch.distributed.all_to_all_single, sent[:] = count_bytes, []
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = objective(HALF, model, *batch)
        loss.backward()
        torch.distributed.all_to_all_single = _all_to_all
        counts.append(sum(count_exchanges().values()) - before)
        update.step()
        update.zero_grad()
        for hook in hooks:
            hook.remove()
        weights.append(split.model_state(model))
    found = {"wrong": wrong, "collectives": counts[-1], "weights": weights[0]}
    return {**found, "sent": sum(sent), "start": expected}


def load_broken(world: int, path: str) -> dict[str, tuple[str, bool]]:
    """Return the errors for checkpoints that can't be read or written.

    Also returns whether the weights are unchanged.
    """
    split, model = start(SAVED, world)
    update = make_optimizer(SAVED, model)
    said: dict[str, tuple[str, bool]] = {}
    for name in ("gone", "cut", "other"):
        folder = Path(f"{path}-{name}")
        if model.exchange.place.rank == 0:
            shutil.copytree(path, folder)
            file = next(folder.glob("optimizer-*"))
            file.write_bytes(file.read_bytes()[:-8])
            if name == "gone":
                file.unlink()
            (folder / "model.safetensors").touch()
        before = [each.detach().clone() for each in model.parameters()]
        use = partial(split.save if name == "other" else split.load, folder, model, update)
        said[name] = last_sentence(use), all(map(torch.equal, before, model.parameters()))
    library, checkpoint_module._safetensors = (
        checkpoint_module._safetensors,
        lambda: SimpleNamespace(safe_open=BadDisk),
    )
    said["bad disk"] = last_sentence(partial(split.load, path, model, update)), not update.state
    checkpoint_module._safetensors = library
    return said


class BadDisk:
    """A file whose header can be read, but not its tensors."""

    def __init__(self, *arguments: Any) -> None:
        self._opened = safe_open(*arguments)
        self.get_slice = self._opened.get_slice

    def __enter__(self) -> None:
        raise OSError("Input/output error")

    def __exit__(self, *_: Any) -> None:
        """Do nothing, as nothing is open."""


def step_with_two_kinds(world: int) -> dict[str, Any]:
    """Return the state of an optimizer that has momentum only for some parameters."""
    split, model = start(ShardCase(), world)
    biases = [each for name, each in model.named_parameters() if "bias" in name]
    rest = [each for name, each in model.named_parameters() if "bias" not in name]
    update = torch.optim.RMSprop([{"params": rest, "momentum": 0.9}, {"params": biases}])
    step_once(split, model, update)
    return split.optimizer_state(update)


def see_buffers(rank: int, world: int) -> list[int]:
    """Return the values of a buffer that differs over ranks, after sharding and after a step.

    The buffer is replaced by another tensor in between.
    """
    split, model = make_split(ShardCase(), SHARES[world]), make_model(ShardCase())
    model.seen = torch.tensor(5 + rank)
    model = split.shard(model)
    seen = [int(model.seen)]
    model.seen = torch.tensor(10 + rank)
    step_once(split, model, torch.optim.SGD(model.parameters(), 0.1))
    return [*seen, int(model.seen)]


def clip_in_half(world: int) -> float:
    """Return the norm of gradients whose squares overflow half precision."""
    model = make_split(ShardCase(), SHARES[world]).shard(make_model(ShardCase()).half())
    for each in model.parameters():
        each.grad = torch.full_like(each, 50.0)
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def train_all(folder: Path, rank: int, world: int, names: Sequence[str], path: str) -> None:
    """Train every case as one rank."""
    torch.set_num_threads(1)
    audit_first_step()
    trained: dict[str, Any] = {name: train(CASES[name], world) for name in names}
    if world != 3 and path:
        trained["on"] = train_on(world, path)
    if world == 3:
        trained["saved"] = train_and_save(world, path)
        trained["broken"] = load_broken(world, path)
        trained["kinds"] = step_with_two_kinds(world)
        trained["buffers"] = see_buffers(rank, world)
        trained["norm in half"] = clip_in_half(world)
        trained["late"] = train_with_late_copies(world)
        trained["half"] = train_in_half(world)
        trained["held"] = hold_half(world)
        trained["autocast"] = train_under_autocast(world)
        trained["full disk"] = refuse(
            lambda split, model: split.save("/dev/full/there", split.shard(model)), world
        )
        trained["refused"] = {
            name: refuse(program, world) for name, (_, program) in REFUSED.items()
        }
    torch.save(trained, folder / f"{rank}.pt")
