"""Train a small network in PyTorch with a plan: three lines differ from a script for one device.

    evener balance --framework torch --workload examples/torch_train.py:build --export plan.toml
    torchrun --nproc-per-node 2 examples/torch_train.py --plan plan.toml
    python examples/torch_train.py --global-batch 256          # one device, without a plan

The number behind --nproc-per-node is that of the devices that have a share in the plan; a wrong one is said.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

from evener.torch_split import Split

SIZE = 28
CLASSES = 10


class Pictures(torch.utils.data.Dataset):
    """Ten patterns under noise, made here; whole batches are fetched at once, which is much faster than row by row."""

    def __init__(self, rows: int, seed: int) -> None:
        patterns = torch.rand(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (rows,), generator=generator)
        self.images = patterns[self.labels] + 1.5 * torch.randn(rows, 1, SIZE, SIZE, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[rows], self.labels[rows]


def network() -> nn.Module:
    """Two convolutions and two dense layers."""
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


def build() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    """What `--workload examples/torch_train.py:build` measures: the same network, optimizer and loss."""
    model = network()
    return model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()


def sample_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for a measurement, of the shapes of the training's."""
    data = Pictures(rows, seed=1)
    return data.images, data.labels


def train_epoch(split: Split, model: Any, loader: Any, optimizer: torch.optim.Optimizer, until: float) -> float:
    """One pass, or until the clock says `until`; the mean loss of the last global batch."""
    criterion = nn.CrossEntropyLoss()
    loss = torch.tensor(float("nan"))
    for images, labels in loader:
        loss = criterion(model(images.to(split.device)), labels.to(split.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if until and split.total(time.monotonic() > until):  # every rank must stop at the same step
            break
    return split.mean(loss)


def accuracy(split: Split, model: Any, loader: Any) -> float:
    """The part of all rows that is classified rightly; rows that only keep step don't count."""
    right = rows = 0
    with torch.no_grad():
        for images, labels in loader:
            found = model(images.to(split.device)).argmax(dim=1).cpu()
            right += int((found == labels)[: split.rows].sum())
            rows += split.rows
    return split.total(right) / split.total(rows)


def main() -> None:
    """Train, and print a line an epoch on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="what evener balance --export wrote")
    parser.add_argument("--global-batch", type=int, help="samples per step, if not the plan's")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--strict", action="store_true", help="refuse a plan of other devices or another model")
    options = parser.parse_args()

    split = Split(options.plan, global_batch=options.global_batch, strict=options.strict)  # 1
    whole = {"collate_fn": lambda batch: batch}  # fetched whole already
    loader = split.loader(Pictures(options.rows, seed=1), seed=0, **whole)  # 2
    held_out = split.loader(Pictures(2048, seed=2), shuffle=False, training=False, **whole)
    torch.manual_seed(0)
    model = split.wrap(network())  # 3
    optimizer = torch.optim.Adam(model.parameters())

    started = time.monotonic()
    until = started + options.seconds if options.seconds else 0.0
    for epoch in range(options.epochs):
        began = time.monotonic()
        loss = train_epoch(split, model, loader, optimizer, until)
        seconds = time.monotonic() - began
        rows = loader.state_dict()["position"]
        right = accuracy(split, model, held_out)
        if split.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.3f}, {rows / seconds:,.0f} samples/s", flush=True)
        if until and split.total(time.monotonic() > until):
            break
    split.close()


if __name__ == "__main__":
    main()
