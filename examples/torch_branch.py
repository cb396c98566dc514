r"""Continue one checkpoint with two batch sizes, to see what the larger one costs.

docs/learning.md explains how.

  evener balance --framework torch -w examples/torch_branch.py:build --global-batch 512 \
      --export plan.toml
  evener launch plan.toml examples/torch_branch.py --save last.pt
  evener launch plan.toml examples/torch_branch.py --resume last.pt
  evener launch plan.toml examples/torch_branch.py --resume last.pt --global-batch 1024 \
      --rate 1.4e-3
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.torch import Split

HELD_OUT = 16_384
CRITERION = nn.CrossEntropyLoss()


def points(rows: int, seed: int) -> TensorDataset:
    """Return random points; a point's label is the largest of three coordinates plus noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 16, generator=generator)
    return TensorDataset(
        inputs, (inputs[:, :3] + torch.randn(rows, 3, generator=generator)).argmax(1)
    )


def network() -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 3))


def build() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, TensorDataset]:
    """Return what `--workload examples/torch_branch.py:build` measures."""
    model = network()
    return model, torch.optim.Adam(model.parameters()), CRITERION, points(HELD_OUT, seed=1)


def train(
    split: Split, model: Any, optimizer: torch.optim.Optimizer, loader: Any, rows: int
) -> int:
    """Train on `rows` rows, rounded to whole steps; return the number of rows."""
    trained = 0
    while trained < rows:
        for images, labels in loader:
            optimizer.zero_grad()
            split.step(
                (images, labels), lambda part: CRITERION(model(part.batch[0]), part.batch[1])
            )
            optimizer.step()
            trained += split.global_batch
            if trained >= rows:
                break
    return trained


def held_out_loss(split: Split, model: Any) -> float:
    """Return the mean loss of rows that aren't used for training."""
    total = 0.0
    with torch.no_grad():
        for images, labels in split.loader(points(HELD_OUT, seed=2), shuffle=False, training=False):
            found = model(images.to(split.device))[: split.rows]
            total += float(
                nn.functional.cross_entropy(
                    found, labels.to(split.device)[: split.rows], reduction="sum"
                )
            )
    return split.total(total) / HELD_OUT


def main() -> None:
    """Train, and print the loss of held-out rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", help="a file written by evener balance --export; evener launch says it"
    )
    parser.add_argument("--global-batch", type=int, help="samples per step, if not the plan's")
    parser.add_argument("--rows", type=int, default=32_768, help="to train on")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--save", help="a file for the end")
    parser.add_argument("--resume", help="such a file, to begin with")
    options = parser.parse_args()

    split = Split(options.plan, global_batch=options.global_batch)
    torch.manual_seed(0)
    net = network()
    model, optimizer = split.wrap(net), torch.optim.Adam(net.parameters(), options.rate)
    if options.resume:
        weights, state = torch.load(options.resume, map_location=split.device)
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = options.rate  # this branch's learning rate
    loader = split.loader(points(options.rows, seed=3 if options.resume else 1), drop_last=True)
    trained = train(split, model, optimizer, loader, options.rows)
    loss = held_out_loss(split, model)
    if split.rank == 0:
        print(
            f"{split.global_batch} rows a step at a rate of {options.rate:g}: loss {loss:.4f} "
            f"after {trained} rows"
        )
        if options.save:
            torch.save((net.state_dict(), optimizer.state_dict()), options.save)
    split.close()


if __name__ == "__main__":
    main()
