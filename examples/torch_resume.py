"""Train in PyTorch so that killed processes cost no more than the steps since the last checkpoint.

The same holds for lost devices. A warning before the end (SIGTERM) costs no steps.

  evener launch --max-restarts 3 plan.toml examples/torch_resume.py --checkpoint checkpoint.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.torch import Split

ROWS = 4096


def points() -> TensorDataset:
    """Return random points; a point's label is the quadrant of its first two coordinates."""
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long())


def save(checkpoint: Path, parts: Any) -> None:
    """Write the checkpoint atomically, because a process may be killed at any time."""
    new = checkpoint.with_suffix(".new")
    torch.save([part.state_dict() for part in parts], new)
    os.replace(new, checkpoint)


def main() -> None:
    """Train, starting from the checkpoint if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", help="a file written by evener balance --export; evener launch says it"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    split = Split(options.plan, journal=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    model, loader = split.wrap(net), split.loader(points(), seed=0)
    optimizer = torch.optim.AdamW(net.parameters())
    parts = (
        net,
        optimizer,
        split,
    )  # the unwrapped network, whose state is the same on any number of devices
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=split.device)
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)

    criterion, loss = nn.CrossEntropyLoss(), 0.0
    for epoch in range(loader.next_epoch, options.epochs):
        for step, batch in enumerate(loader, 1):
            loss = 0.0
            for part in split.parts(
                batch
            ):  # a single part, unless the plan computes shares in passes
                inputs, labels = part.batch
                loss += part.backward(
                    criterion(model(inputs.to(split.device)), labels.to(split.device))
                )
            optimizer.step()
            optimizer.zero_grad()
            ending = split.ending
            if (ending or step % options.every == 0) and split.rank == 0:
                save(options.checkpoint, parts)
            if ending:
                split.close()
                return
        loss = split.mean(loss)
        if split.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} on {split.world} devices", flush=True)
    split.close()


if __name__ == "__main__":
    main()
