"""What test programs with `Split` share: data, a network, a loop, and the lists of programs.

A program gets a `Given` and contains only what distinguishes it: `given.fit` trains a model with
the program's own step, and `given.split()` starts a loop that is written out.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from evener.errors import EvenerError
from evener.torch import Split
from tests.support.torch_ranks import example_plan

WIDTH, CLASSES = 5, 3
SHORT_TAIL, TAIL = 25, 29  # rows of data, whose last batch of 8 has 1 or 5
BY_ROWS = re.compile(
    "plain|rows|batch|length|texts|passes|accumul|gan|gather|loader|sampler|validation"
)
Weights = list[torch.Tensor]


class Loop(NamedTuple):
    """The model and optimizer of a training."""

    model: Any
    optimizer: torch.optim.Optimizer

    def update(self, loss: torch.Tensor) -> None:
        """Do one usual step."""
        update(self.optimizer, loss)


Step = Callable[..., None]  # (loop, inputs, labels)


class Given(NamedTuple):
    """The rows of each rank per step, and the data, with which a program trains."""

    shares: tuple[int, ...]
    rows: TensorDataset

    def split(self, times: int = 1, **options: Any) -> Split:
        """Return a Split with the sum of shares as global batch, or `times` that."""
        return Split(ratios=self.shares, global_batch=times * sum(self.shares), **options)

    def split_in_passes(self) -> Split:
        """Return a Split with passes of at most two rows, whose number differs over ranks."""
        micros = tuple(min(2, each) for each in self.shares)
        return Split(example_plan(self.shares, micros=micros))

    def turned(self) -> Given:
        """Return the same with the shares reversed."""
        return Given(self.shares[::-1], self.rows)

    def fit(self, net: nn.Module, step: Step, **wrapped: Any) -> Weights:
        """Train for two epochs with the program's own step; `wrapped` is passed to split.wrap."""
        split = self.split()
        model = split.wrap(net.double(), **wrapped)
        loop = Loop(model, adamw(model))
        loader = split.loader(self.rows)
        for _ in range(2):
            for batch in loader:
                step(loop, *batch)
        return weights(model)


Program = Callable[[Given], Weights]
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
    """Return the sizes of a program's data sets.

    A program that handles rows gets both; others get the one whose last batch has one row.
    """
    return (SHORT_TAIL, TAIL) if name in EXACT and BY_ROWS.search(name) else (SHORT_TAIL,)


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (rows,), generator=generator))


def network(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def adamw(model: Any) -> torch.optim.Optimizer:
    """AdamW changes a weight whose gradient is 0, but not one without a gradient."""
    return torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.3)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], 0.2, momentum=0.9
    )


def weights(*models: Any) -> Weights:
    return [each.detach().clone() for model in models for each in model.parameters()]


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def plain(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Do a step with cross entropy."""
    loop.update(F.cross_entropy(loop.model(inputs), labels))


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
    """Yield each batch after the next one has been fetched."""
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


def run(program: Program, shares: tuple[int, ...], rows: int) -> Weights | str:
    """Return the program's weights, or the error that refuses it.

    Remaining objects are hidden from the garbage collector, because a split searches all objects.
    """
    try:
        return program(Given(shares, data(rows)))
    except EvenerError as error:
        return str(error)
    finally:
        gc.collect()
        gc.freeze()
