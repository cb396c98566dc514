"""A typical training script, run as `python plain_program.py ROWS END`.

ROWS says where its rows come from: "loader", "tensors", "ranks" for several ranks whose loaders
have no sampler of their own, or "nothing" to train nothing. END says how it ends: "exit" by
sys.exit(3), "raise" by an exception, "never" not before Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROWS, BATCH, EPOCHS = 84, 8, 4  # the last batch of an epoch has 4 rows
STEPS = EPOCHS * 11
READ_SECONDS = 0.002  # a row
SAVE_SECONDS = 0.05  # a checkpoint, once in an epoch
VALIDATION_BATCHES = 2


class Rows(Dataset[Any]):
    """Rows that each take a while to read."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        time.sleep(READ_SECONDS)
        return torch.full((4,), float(row)), row % 3


class SlowFile:
    """What takes a while to be saved."""

    def __reduce__(self) -> Any:
        time.sleep(SAVE_SECONDS)
        return (SlowFile, ())


def train_by_loader(net: nn.Module, opt: torch.optim.Optimizer, end: str) -> None:
    held_back = DataLoader(Rows(VALIDATION_BATCHES * BATCH), BATCH)
    for epoch in count() if end == "never" else range(EPOCHS):
        for inputs, labels in DataLoader(Rows(ROWS), BATCH):  # a new one for each epoch
            opt.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            opt.step()
        for inputs, _labels in held_back:
            with torch.no_grad():
                net(inputs)
        if epoch == EPOCHS:
            Path("begun").touch()


def train_by_tensors(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    """Accumulate the gradients of two passes in each update."""
    for step in range(STEPS):
        for _ in range(2):
            nn.functional.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 3).backward()
        opt.step()
        opt.zero_grad()
        if step % 11 == 10:
            torch.save((net.state_dict(), SlowFile()), "checkpoint.pt")


def take_gradients(net: nn.Module) -> Iterator[float]:
    """Compute gradients, as for a map of what a model looks at, without training."""
    for inputs, labels in DataLoader(Rows(ROWS), BATCH):
        nn.functional.cross_entropy(net(inputs.requires_grad_()), labels).backward()
        yield float(inputs.grad.norm())


def main(rows: str, end: str) -> None:
    net: nn.Module = nn.Linear(4, 3)
    if rows == "ranks":
        torch.distributed.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.AdamW(net.parameters())
    if rows in ("loader", "ranks"):
        train_by_loader(net, opt, end)
    elif rows == "tensors":
        train_by_tensors(net, opt)
    else:
        print(sum(take_gradients(net)))
    if end == "exit":
        sys.exit(3)
    if end == "raise":
        raise ValueError("a fault of its own")


if __name__ == "__main__":
    main(*sys.argv[1:])
