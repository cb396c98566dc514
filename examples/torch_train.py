"""Train a small network in PyTorch with a plan.

Three lines and the loop over parts differ from a script for one device.

  evener balance --framework torch --workload examples/torch_train.py:build --export plan.toml
  evener launch plan.toml examples/torch_train.py
  python examples/torch_train.py --global-batch 256          # one device, without a plan
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.torch import Split

SIZE = 28
CLASSES = 10
ROWS = 16_384


def pictures(rows: int, seed: int) -> TensorDataset:
    """Return ten generated patterns with noise, as a TensorDataset.

    evener fetches a TensorDataset's rows one batch at a time instead of one by one.
    """
    patterns = torch.rand(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    noise = torch.randn(rows, 1, SIZE, SIZE, generator=generator)
    return TensorDataset(noise.mul_(1.5).add_(patterns[labels]), labels)


def network() -> nn.Module:
    """Return a network of two convolutions and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def build(rows: int = ROWS) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, TensorDataset]:
    """Return what `--workload examples/torch_train.py:build` measures."""
    model = network()
    return (
        model,
        torch.optim.Adam(model.parameters()),
        nn.CrossEntropyLoss(),
        pictures(rows, seed=1),
    )


def train_epoch(split: Split, model: Any, loader: Any, optimizer: torch.optim.Optimizer) -> float:
    """Train for one epoch; return the mean loss of the last global batch."""
    criterion = nn.CrossEntropyLoss()
    loss = 0.0
    for batch in loader:
        optimizer.zero_grad()
        loss = 0.0
        for part in split.parts(batch):  # a single part, unless the plan computes shares in passes
            images, labels = part.batch
            loss += part.backward(
                criterion(model(images.to(split.device)), labels.to(split.device))
            )
        optimizer.step()
    return split.mean(loss)


def accuracy(split: Split, model: Any, loader: Any) -> float:
    """Return the fraction of rows that are classified correctly; padding rows don't count."""
    right = rows = 0
    with torch.no_grad():
        for images, labels in loader:
            found = model(images.to(split.device)).argmax(dim=1) == labels.to(split.device)
            right += int(found[: split.rows].sum())
            rows += split.rows
    return split.total(right) / split.total(rows)


def main() -> None:
    """Train, and print a line per epoch on the first rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", help="a file written by evener balance --export; evener launch says it"
    )
    parser.add_argument("--global-batch", type=int, help="samples per step, if not the plan's")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="train for this long instead of --epochs"
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse a plan of other devices or another model"
    )
    options = parser.parse_args()

    split = Split(options.plan, global_batch=options.global_batch, strict=options.strict)  # 1
    loader = split.loader(pictures(options.rows, seed=1), seed=0)  # 2
    held_out = split.loader(pictures(2048, seed=2), shuffle=False, training=False)
    torch.manual_seed(0)
    model = split.wrap(network())  # 3
    optimizer = torch.optim.Adam(model.parameters())

    rates: list[float] = []
    until = time.monotonic() + options.seconds
    while split.total(time.monotonic() < until) if options.seconds else len(rates) < options.epochs:
        began = time.monotonic()
        loss = train_epoch(split, model, loader, optimizer)
        rates.append(options.rows / (time.monotonic() - began))
        right = accuracy(split, model, held_out)
        if split.rank == 0:
            print(
                f"epoch {len(rates)}: loss {loss:.4f}, accuracy {right:.3f}, {rates[-1]:,.0f} "
                f"samples/s",
                flush=True,
            )
    if split.rank == 0:
        print(summary(rates, split))
    split.close()


def summary(rates: list[float], split: Split) -> str:
    """Return the samples/s over all epochs except the first, as text.

    In the first epoch, memory is allocated and kernels are chosen.
    """
    steady = rates[1:] or rates
    rate = len(steady) / sum(1 / each for each in steady)
    promised = (
        split.plan.throughput.samples_per_second if split.plan else 0.0
    )  # 0: the plan was written by hand
    said = f"; the plan says {promised:,.0f}" if promised else ""
    return f"{rate:,.0f} samples/s over {len(steady)} epochs{said}"


if __name__ == "__main__":
    main()
