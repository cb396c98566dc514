"""What trains in `python -m benchmarks.rebalance real` and `gpus`, and what disturbs its second
rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

ROW_SECONDS = 0.0004
SLOWED = 1.4
TOKENS, WORDS = 128, 1024  # of a row


class Job(NamedTuple):
    """A training, and what begins or ends the disturbance of a network; the second rank calls
    it.
    """

    batch: int
    make_network: Callable[[], Any]
    rows: TensorDataset
    disturb: Callable[[Any, bool], None]


class Sleep(torch.autograd.Function):  # type: ignore[misc]
    """Takes so many seconds for each row."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, seconds: float) -> torch.Tensor:
        """The rows as they are."""
        context.seconds = seconds * len(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it is."""
        time.sleep(context.seconds)
        return gradient, None


class SleepyNetwork(torch.nn.Module):  # type: ignore[misc]
    """A small network whose last gradients come after a sleep for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        self.seconds = ROW_SECONDS

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.rest(Sleep.apply(self.first(rows), self.seconds))
        return logits

    def disturb(self, disturbed: bool) -> None:
        """Sleep longer from now on, or no longer."""
        self.seconds = ROW_SECONDS * (SLOWED if disturbed else 1)


class Block(torch.nn.Module):  # type: ignore[misc]
    """The wider half of a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        self.layers = torch.nn.Sequential(torch.nn.LayerNorm(width), *wide)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens and what is made of them."""
        changed: torch.Tensor = tokens + self.layers(tokens)
        return changed


class ComputingNetwork(torch.nn.Module):  # type: ignore[misc]
    """Blocks over the tokens of a row; two logits for each row."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = torch.nn.Linear(width, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits, computed in bfloat16."""
        with torch.autocast(rows.device.type, torch.bfloat16):
            logits: torch.Tensor = self.head(self.blocks(self.words(rows)).mean(1)).float()
        return logits


def make_sleeping() -> Job:
    """For two CPU slices; the network itself takes longer for a row."""
    rows = TensorDataset(torch.randn(9600, 8), torch.zeros(9600, dtype=torch.long))
    return Job(96, SleepyNetwork, rows, SleepyNetwork.disturb)


def make_computing(disturb: Callable[[bool], None]) -> Job:
    """For GPUs, with steps of some 20 ms on two H200; where there is none a tiny one, to try the
    benchmark.
    """
    on_gpu = torch.cuda.is_available()
    batch, width, blocks, length = (256, 1024, 8, 131_072) if on_gpu else (96, 32, 2, 9600)
    rows = torch.randint(0, WORDS, (length, TOKENS), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, rows[:, 0] % 2)
    return Job(
        batch,
        partial(ComputingNetwork, width, blocks),
        data,
        lambda _, disturbed: disturb(disturbed),
    )
