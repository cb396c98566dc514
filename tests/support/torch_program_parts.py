"""What training programs of tests are made of: data, a network, loops, and the lists of what is
exact and refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from evener.errors import EvenerError
from evener.plan.file import make_layout
from evener.torch import Split
from tests.support.torch_ranks import example_plan

WIDTH, CLASSES = 5, 3
SHORT_TAIL, TAIL = 25, 29  # rows of data, of which a last batch of 8 has 1 and 5
BY_ROWS = re.compile(
    "plain|rows|batch|length|texts|passes|accumul|gan|gather|loader|sampler|validation"
)
Program = Callable[[tuple[int, ...], TensorDataset], list[torch.Tensor]]
EXACT: dict[str, Program] = {}
REFUSED: dict[str, tuple[str, Program]] = {}


def exact(program: Program) -> Program:
    EXACT[program.__name__] = program
    return program


def refused(words: str) -> Callable[[Program], Program]:
    def note(program: Program) -> Program:
        REFUSED[program.__name__] = (words, program)
        return program

    return note


def rows_for(name: str) -> tuple[int, ...]:
    """The sizes of a program's data sets: both if it does something with rows, else the one with a
    tail of one row.
    """
    return (SHORT_TAIL, TAIL) if name in EXACT and BY_ROWS.search(name) else (SHORT_TAIL,)


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (rows,), generator=generator))


def network(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def split_by(shares: tuple[int, ...], times: int = 1, **options: Any) -> Split:
    return Split(ratios=shares, global_batch=times * sum(shares), **options)


def split_in_passes(shares: tuple[int, ...]) -> Split:
    """Of two rows at most; ranks then take different numbers of them."""
    plan = example_plan(shares)
    layout = make_layout(
        plan.layout.kind, plan.layout.share, shares, micros=tuple(min(2, each) for each in shares)
    )
    return Split(msgspec.structs.replace(plan, layout=layout))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], 0.2, momentum=0.9
    )


def weights(*models: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for model in models for each in model.parameters()]


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(
    model: Any, batches: Iterable[Any], optimizer: torch.optim.Optimizer | None = None
) -> None:
    optimizer = optimizer or sgd(model)
    for inputs, labels in batches:
        update(optimizer, F.cross_entropy(model(inputs), labels))


def own_ddp(split: Split, net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net) if split.world > 1 else net


def early(
    batches: Iterable[Any], change: Callable[[Any], Any] = lambda each: each
) -> Iterator[Any]:
    """Each batch once the next one is there."""
    source = iter(batches)
    ready = change(next(source))
    for following in source:
        changed = change(following)
        del following
        yield ready
        ready = changed
    yield ready


def shard(split: Split, net: nn.Module) -> nn.Module:
    if split.world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (split.world,)))
    return net


def run(program: Program, shares: tuple[int, ...], rows: int) -> list[torch.Tensor] | str:
    """What it returns, or the sentence that refuses it."""
    try:
        return program(shares, data(rows))
    except EvenerError as error:
        return str(error)
