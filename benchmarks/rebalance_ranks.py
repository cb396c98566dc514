"""One rank of the training that `python -m benchmarks.rebalance real` starts: its backward pass sleeps for each row."""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.utils.data import TensorDataset

from evener.torch_split import Split

ROW_SECONDS = 0.0004
BATCH = 96
SLOWED = 1.4
SHORT = 100  # steps of a training whose speed doesn't change


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


def train(split: Split, steps: int, slow: range) -> list[float]:
    """When each step ended; the second rank is slower in the steps of `slow`."""
    torch.manual_seed(0)
    network = SleepyNetwork()
    model = split.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows = TensorDataset(torch.randn(BATCH * steps, 8), torch.zeros(BATCH * steps, dtype=torch.long))
    times = []
    for step, (inputs, labels) in enumerate(split.loader(rows)):
        if split.rank == 1:
            network.seconds = ROW_SECONDS * (SLOWED if step in slow else 1)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return times


def step_seconds(times: list[float], first: int, last: int) -> float:
    """The median of some steps."""
    return median(after - before for before, after in pairwise(times[first:last]))


def main() -> None:
    """Train four times; the first rank prints what came of it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs=3, help="the second rank is slower from, until; all")
    start, end, steps = parser.parse_args().steps
    torch.set_num_threads(1)
    always, never = range(SHORT), range(0)
    fixed = {
        "free": step_seconds(train(Split(ratios=[1, 1], global_batch=BATCH), SHORT, never), 20, SHORT),
        "stayed": step_seconds(train(Split(ratios=[1, 1], global_batch=BATCH), SHORT, always), 20, SHORT),
        "oracle": step_seconds(train(Split(ratios=[SLOWED, 1], global_batch=BATCH), SHORT, always), 20, SHORT),
    }
    split = Split(ratios=[1, 1], global_batch=BATCH, rebalance=True)
    times = train(split, steps, range(start, end))
    changes = [(change.step, change.after) for change in split._reporter.changes]
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"fixed": fixed, "times": times, "changes": changes}), flush=True)


if __name__ == "__main__":
    main()
