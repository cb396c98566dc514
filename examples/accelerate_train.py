"""Train a small network with accelerate and a plan; two lines differ from a script without a plan.

  evener balance --framework torch --workload examples/accelerate_train.py:build --export plan.toml
  evener launch plan.toml examples/accelerate_train.py

A plan with shares in passes needs one more loop, over split.parts: see docs/training_torch.md.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

from evener.torch import Split

ROWS, SIZE, CLASSES = 65_536, 256, 10


def network() -> nn.Module:
    """Return a network of three dense layers."""
    return nn.Sequential(
        nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
    )


def vectors(rows: int = ROWS) -> TensorDataset:
    """Return noisy vectors with their classes."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, SIZE, generator=generator)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return TensorDataset(centers[labels] + 3 * torch.randn(rows, SIZE, generator=generator), labels)


def build() -> tuple[Any, ...]:
    """Return what `--workload examples/accelerate_train.py:build` measures."""
    model = network()
    return model, torch.optim.Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss(), vectors()


def main() -> None:
    """Train, and print a line per epoch on the first rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    split = Split()
    torch.manual_seed(0)
    module = network()
    model, optimizer = accelerator.prepare(module, torch.optim.Adam(module.parameters(), 1e-3))
    model, loader = (
        split.wrap(model),
        split.loader(vectors(), seed=0),
    )  # 1: replaces the prepared loader
    for epoch in range(options.epochs):
        began = time.monotonic()
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = split.mean(loss)  # 2: the mean over all ranks' rows
        accelerator.print(
            f"epoch {epoch + 1}: loss {mean:.4f}, {ROWS / (time.monotonic() - began):,.0f} "
            f"samples/s"
        )


if __name__ == "__main__":
    main()
