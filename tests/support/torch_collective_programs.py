"""Losses that call collective operations themselves, on two ranks; the second runs out
of memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from evener.balancer.store import runs
from evener.errors import DeviceError
from evener.live.journal import RetreatEntry
from evener.torch import Split
from tests.support.last_words import last_words
from tests.support.torch_oom_programs import Bomb, Fuse

WIDTH, STEPS = 4, 4
CASES = {  # in the first step, where its memory runs out
    "before the loss counts": ("forward", 0),
    "after the loss counts": ("backward", 1),
    "two steps before the loss counts": ("forward", 0),
    "in front of a layer": ("forward", 0),
    "behind a layer": ("forward", 1),
    "sharded": ("forward", 1),
}


class MeanOverRanks(torch.autograd.Function):
    """Subtracts a mean over all ranks' rows, like SyncBatchNorm."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        mean = rows.mean(0)
        dist.all_reduce(mean)
        return rows - mean / 2

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        mean = gradient.mean(0)
        dist.all_reduce(mean)
        return gradient - mean / 2


class Net(nn.Module):
    def __init__(self, fuse: Fuse, meets: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.fuse, self.meets = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 1),
            fuse,
            meets,
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.fuse.begin()
        hidden = self.first(Bomb.apply(rows, self.fuse, 0))
        hidden = MeanOverRanks.apply(hidden) if self.meets else hidden
        made: torch.Tensor = self.last(Bomb.apply(hidden, self.fuse, 1))
        return made


def train(folder: Path, rank: int, name: str) -> None:
    """Save how a rank's training ends, and how many steps it took."""
    torch.set_num_threads(1)
    layered, sharded = name.endswith("layer"), name == "sharded"
    split = Split(
        ratios=[1, 1], global_batch=16, weigh="loss" if layered or sharded else "gradients"
    )
    fuse = Fuse()
    model: Any = Net(fuse, layered).double()
    if sharded:
        # imported here, as it takes a second and only ranks need it
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model)
    model = split.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fuse.at = [(*CASES[name], 0)] if rank == 1 else []
    data = TensorDataset(
        torch.randn(16 * STEPS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    )
    steps = 0

    def compute(part: Any) -> Any:
        loss = model(part.batch[0]).square().mean()
        if "counts" in name and (steps >= 2 or "two steps" not in name):
            dist.all_reduce(torch.tensor([float(part.rows)]))
        return loss

    try:
        for batch in split.loader(data, shuffle=False):
            split.step(batch, compute)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        ended = "learned"
    except (DeviceError, RuntimeError) as error:
        ended = last_words(error)
    torch.save((ended, steps), folder / f"{rank}.pt")


def train_noted(folder: Path, rank: int, state: str) -> None:
    """Save the journal's out-of-memory lines on the first rank, and the messages of the other."""
    torch.set_num_threads(1)
    os.environ |= {"XDG_STATE_HOME": state, "EVENER_RUN": "20261122-120000-abc1"}
    split, fuse = Split(ratios=[1, 1], global_batch=16, journal=True), Fuse()
    said: list[Any] = []
    model = split.wrap(Net(fuse, False).double())
    for step, batch in enumerate(split.loader(TensorDataset(torch.randn(48, WIDTH).double()))):
        fuse.at, fuse.passes = [("forward", 0, 0)] if step in (rank, 2 * rank) else [], -1
        split.step(batch, lambda part: model(part.batch[0]).square().mean())
        said += [split.reporter.retreat] if fuse.burst > len(said) else []
    split.close()
    training = runs.load_training("20261122-120000-abc1")
    assert training is not None
    lines = [entry.line for entry in training.entries if isinstance(entry, RetreatEntry)]
    torch.save(said if rank else lines, folder / f"{rank}.pt")


def leave(folder: Path, rank: int, who: int, how: str) -> None:
    """Save what a rank prints when rank `who` ends in the second step.

    `how` says whether that one raises an error or closes its connections.
    """
    torch.set_num_threads(1)
    split, said = Split(ratios=[1, 1], global_batch=16), ""
    model = split.wrap(Net(Fuse(), False).double())
    try:
        for step, batch in enumerate(split.loader(TensorDataset(torch.randn(48, WIDTH).double()))):
            if step == 1 and rank == who and how == "raises":
                raise OSError("No space left on device")
            if step == 1 and rank == who:
                break  # like a killed rank, it only closes its connections
            split.step(batch, lambda part: model(part.batch[0]).square().mean())
    except (OSError, RuntimeError) as error:
        said = last_words(error)
    torch.save(said, folder / f"{rank}.pt")
