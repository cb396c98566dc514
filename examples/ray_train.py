"""Train a small network with Ray Train and a plan for several hosts.

A failed training continues from Ray's checkpoint.

  evener balance --devices ray --framework torch -w examples/torch_train.py:build --export plan.toml
  python examples/ray_train.py plan.toml --storage /shared/runs
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.ray import trainer
from evener.torch import Split

ROWS, SIZE, CLASSES = 65_536, 256, 10


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker, with the share of the plan that evener assigned to it."""
    split = Split()
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (ROWS,))
    vectors = torch.randn(CLASSES, SIZE)[labels] + 3 * torch.randn(ROWS, SIZE)
    loader = split.loader(TensorDataset(vectors, labels), seed=0)
    model = split.wrap(nn.Sequential(nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, CLASSES)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    parts = (model, optimizer, loader)
    epoch = load(parts)
    for done in range(epoch + 1, config["epochs"] + 1):
        for inputs, answers in loader:
            loss = nn.functional.cross_entropy(model(inputs), answers)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save(parts, done, split.mean(loss), split.rank)


def load(parts: tuple[Any, ...]) -> int:
    """Restore Ray's last checkpoint; return the number of epochs that it has completed."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        states, epoch = torch.load(Path(folder, "state.pt"))
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    return int(epoch)


def save(parts: tuple[Any, ...], epoch: int, loss: float, rank: int) -> None:
    """Report from every worker; the first worker's state is the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save(([part.state_dict() for part in parts], epoch), Path(folder, "state.pt"))
        ray.train.report(
            {"epoch": epoch, "loss": loss},
            ray.train.Checkpoint.from_directory(folder) if rank == 0 else None,
        )


def main() -> None:
    """Train, and print the last report of the first worker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", help="a folder that every host can write")
    options = parser.parse_args()
    run = ray.train.RunConfig(
        storage_path=options.storage, failure_config=ray.train.FailureConfig(max_failures=1)
    )
    result = trainer(
        options.plan, train_loop, train_loop_config={"epochs": options.epochs}, run_config=run
    ).fit()
    print(result.metrics)


if __name__ == "__main__":
    main()
