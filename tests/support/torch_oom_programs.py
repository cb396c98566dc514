"""Trainings on several ranks whose passes run out of memory, compared with one process.

A Bomb raises an out-of-memory error at a layer, forward or backward, and in some trainings before
the optimizer's first step. The process that is compared computes the same passes without evener's
code: it adds up the gradients of all ranks' passes, each with the random state and the buffers that
the rank had.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.torch import Split
from evener.torch.step.step import Passes
from evener.training import passes as pass_limits
from tests.support.fewer_audits import audit_first_step
from tests.support.torch_ranks import example_plan

WIDTH, CLASSES, LAYERS = 6, 3, 4


class Case(msgspec.Struct, frozen=True):
    """One training: its layers, how often errors are planted, and the kind of loop."""

    dropout: float = 0.0
    normalize: bool = False
    passes: int = 1
    bombs: float = 0.6  # probability that a step has any
    by_parts: bool = False
    counted: bool = False
    accumulate: int = 1
    steps: int = 12
    seed: int = 0


class Fuse:
    """Where the next error is planted.

    That is: forward or backward, the layer (or after all), and the pass counted from now.
    """

    def __init__(self) -> None:
        self.at: list[tuple[str, int, int]] = []
        self.passes, self.burst = -1, 0

    def begin(self) -> None:
        self.passes += 1

    def reach(self, way: str, layer: int) -> None:
        for bomb in self.at:
            if bomb[:2] == (way, layer) and bomb[2] <= self.passes:
                self.at.remove(bomb)
                self.burst += 1
                raise torch.OutOfMemoryError("CUDA out of memory (injected).")


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, fuse: Fuse, layer: int) -> torch.Tensor:
        ctx.fuse, ctx.layer = fuse, layer
        fuse.reach("forward", layer)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.fuse.reach("backward", ctx.layer)
        return gradient, None, None


class Net(nn.Module):
    """A stack of layers with a possible error before each."""

    def __init__(self, case: Case, fuse: Fuse) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=not case.normalize) for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(WIDTH) if case.normalize else nn.Identity() for _ in range(LAYERS)
        )
        self.last, self.dropout, self.fuse = nn.Linear(WIDTH, CLASSES), case.dropout, fuse

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.fuse.begin()
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            rows = F.dropout(
                torch.tanh(norm(layer(Bomb.apply(rows, self.fuse, number)))), self.dropout
            )
        made: torch.Tensor = self.last(rows)
        return made


def data(case: Case, shares: Sequence[int]) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(case.seed)
    rows = case.steps * sum(shares)
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(
        inputs, torch.randint(0, CLASSES, (rows,), generator=generator)
    )


def make_split(case: Case, shares: Sequence[int]) -> Split:
    micros = tuple(-(-share // case.passes) for share in shares)
    return Split(example_plan(tuple(shares), micros=micros))


def place_bombs(case: Case, numbers: random.Random) -> list[tuple[str, int, int]]:
    if numbers.random() > case.bombs:
        return []
    count = numbers.choice((1, 1, 2))
    return [
        (
            numbers.choice(("forward", "backward")),
            numbers.randint(1, LAYERS),
            numbers.randrange(2 * case.passes),
        )
        for _ in range(count)
    ]


def seed(case: Case, rank: int, step: int) -> None:
    torch.manual_seed(1000 * case.seed + 10 * step + rank)


def train(case: Case, shares: Sequence[int]) -> dict[str, Any]:
    """Train as one rank; return weights, buffers, losses, and the rows of each pass that
    was kept.
    """
    pass_limits.CLEAN_STEPS = 0  # each step tries a larger pass again
    split, fuse = make_split(case, shares), Fuse()
    net = Net(case, fuse).double()
    model = split.wrap(net, bucket_cap_mb=0.0004)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    numbers, kept, losses = random.Random(100 * case.seed + split.rank), [], []
    for step, batch in enumerate(split.loader(data(case, shares), shuffle=False)):
        fuse.at, fuse.passes = place_bombs(case, numbers), -1
        seed(case, split.rank, step)
        last = (step + 1) % case.accumulate == 0
        with split.no_sync(model) if not last else torch.enable_grad():
            sizes, loss = take_step(case, split, model, batch)
        kept.append(sizes)
        losses.append(split.mean(loss))
        fuse.at = []
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with no_room_once(fuse, step < case.accumulate and numbers.random() < 0.5):
                optimizer.step()
            optimizer.zero_grad()
    state = [each.detach().cpu() for each in (*net.parameters(), *net.buffers())]
    return {"state": state, "kept": kept, "losses": losses, "burst": fuse.burst}


@contextmanager
def no_room_once(fuse: Fuse, wanted: bool) -> Iterator[None]:
    """A context in which the optimizer's first tensor doesn't fit, if `wanted`."""
    made = torch.empty_like
    fuse.at = [("optimizer", 0, 0)] if wanted else []
    fuse.passes = 0

    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        fuse.reach("optimizer", 0)
        return made(*arguments, **keywords)

    with patch.object(torch, "empty_like", make):
        yield


def take_step(case: Case, split: Split, model: Any, batch: Any) -> tuple[list[int], Any]:
    """Do a step; return the rows of each pass whose backward pass finished, and the loss."""
    tried: list[int] = []
    kept: list[int] = []
    close = Passes.close

    def note(passes: Passes) -> None:
        close(passes)
        kept.append(tried[-1])

    def compute(part: Any) -> torch.Tensor:
        tried.append(part.rows)
        scores = Bomb.apply(model(part.batch[0]), model.module.fuse, LAYERS)
        return F.cross_entropy(scores, part.batch[1], ignore_index=1 if case.counted else -100)

    def count(part: Any) -> Any:
        return (part.batch[1] != 1).sum()

    with patch.object(Passes, "close", note):
        if not case.by_parts:
            return kept, split.step(batch, compute, count if case.counted else None)
        total = 0.0
        for part in split.parts(batch, count if case.counted else None):
            with part:
                total = total + part.backward(compute(part))
    return kept, total


def reference(
    case: Case,
    shares: Sequence[int],
    kept: Sequence[Sequence[Sequence[int]]],
    device: str = "cpu",
    factor: float = 1.0,
) -> dict[str, Any]:
    """Train in one process with the passes that the ranks kept, by rank and step.

    Gradients are multiplied by `factor`.
    """
    net = Net(case, Fuse()).to(device, torch.float64)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    inputs, labels = (each.to(device) for each in data(case, shares).tensors)
    losses = []
    for step in range(case.steps):
        first, losses_of_step = step * sum(shares), 0.0
        whole = labels[first : first + sum(shares)]
        before = [each.clone() for each in net.buffers()]
        after: list[Any] = []
        for rank in range(len(shares)):
            put_back(net, before)
            seed(case, rank, step)
            for rows in kept[rank][step]:
                own = labels[first : first + rows]
                loss = F.cross_entropy(
                    net(inputs[first : first + rows]),
                    own,
                    ignore_index=1 if case.counted else -100,
                    reduction="sum",
                )
                loss = loss / ((whole != 1).sum() if case.counted else len(whole))
                (loss * factor).backward()
                losses_of_step += float(loss.detach())
                first += rows
            after = after or [each.clone() for each in net.buffers()]
        put_back(net, after)
        losses.append(losses_of_step)
        if (step + 1) % case.accumulate == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "state": [each.detach().cpu() for each in (*net.parameters(), *net.buffers())],
        "losses": losses,
    }


def put_back(net: nn.Module, values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(net.buffers(), values, strict=True):
        buffer.copy_(value)


CASES = {
    "plain": Case(),
    "plain in passes": Case(passes=3),
    "by parts, counted": Case(passes=2, by_parts=True, counted=True),
    "dropout": Case(dropout=0.3),
    "dropout in passes, accumulated": Case(dropout=0.3, passes=3, accumulate=2),
    "normalized": Case(normalize=True, dropout=0.2),
    "normalized in passes": Case(normalize=True, passes=2),
    "accumulated": Case(passes=2, accumulate=3, counted=True),
}


def train_all(folder: Path, rank: int, shares: Sequence[int], seeds: Sequence[int]) -> None:
    """Train every case with each seed as one rank."""
    torch.set_num_threads(1)
    audit_first_step()
    cases = {
        (name, each): msgspec.structs.replace(case, seed=each)
        for name, case in CASES.items()
        for each in seeds
    }
    torch.save(
        {key: train(case, tuple(shares)) for key, case in cases.items()}, folder / f"{rank}.pt"
    )
