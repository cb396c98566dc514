"""What real ranks do for tests of own work and of shares that change; each function is one rank of a RankServer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from evener import live
from evener.live import read_trainings
from evener.torch_split import Split
from tests.support.torch_program_parts import data, network

SLEEP_SECONDS = 0.1


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if int(os.environ["RANK"]) == 1:
            time.sleep(SLEEP_SECONDS)
        return gradient


class SlowBackward(torch.nn.Module):
    """The tests' network; the backward pass of rank 1 sleeps before its last gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = torch.nn.Linear(5, 5).double(), network()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.rest(_Sleep.apply(self.first(rows)))


def slow_backward(folder: Path, rank: int) -> None:
    """Train by hooks, by the loss and in passes; leave what the live files say of each."""
    torch.set_num_threads(1)
    live.INTERVAL_SECONDS, live.COST_LIMIT = 0.0, 1.0
    found = {
        "gradients": _live_record(Split(ratios=(3, 1), global_batch=8)),
        "loss": _live_record(Split(ratios=(3, 1), global_batch=8, weigh="loss")),
    }
    torch.save(found, folder / f"{rank}.pt")


def _live_record(split: Split) -> dict[str, Any]:
    model = split.wrap(SlowBackward())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in split.loader(data(64)):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        (split.scale(loss) if split.weigh == "loss" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    (own,) = (each for each in read_trainings() if each.pid == os.getpid())
    split._reporter.close()
    record: dict[str, Any] = msgspec.to_builtins(own)
    return record
