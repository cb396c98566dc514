"""A training loop for Ray Train in float64, with the plan's shares.

It resumes once from Ray's checkpoint, and saves what each rank learned.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch

from evener.torch import Split
from tests.support.torch_ranks import (
    CASES,
    STEPS,
    TrainingCase,
    compute,
    data,
    finish,
    model,
    optimizer,
)

NAME = "clip adamw"
SAVED, LOST = 7, 9  # steps: those after the checkpoint are trained twice


def train_loop(config: dict[str, Any]) -> None:
    """Train as one worker."""
    case, split = CASES[NAME], Split()
    train(case, split, LOST)
    net, losses = train(case, split, STEPS)
    learned = {"weights": [weights.detach() for weights in net.parameters()], "losses": losses}
    place = {
        "rows": split.shares[split.rank],
        "host": os.environ["EVENER_HOST"],
        "cores": os.sched_getaffinity(0),
    }
    torch.save({**learned, **place}, Path(config["folder"], f"{split.rank}.pt"))


def train(case: TrainingCase, split: Split, steps: int) -> tuple[Any, list[float]]:
    """Train a new model, or the one in Ray's checkpoint, until it has had this many steps."""
    net = split.wrap(model(case))
    parts = (net, optimizer(case, net), split.loader(data(case), seed=2))
    losses = load_checkpoint(split.rank, parts)
    while True:
        for batch in parts[2]:
            losses.append(compute(case, split, net, batch))
            finish(case, len(losses) - 1, net, parts[1])
            if len(losses) == SAVED:
                save_checkpoint(split.rank, parts, losses)
            if len(losses) == steps:
                return net, losses


def load_checkpoint(rank: int, parts: tuple[Any, ...]) -> list[float]:
    """Return the losses up to the last checkpoint; empty without one."""
    losses: list[float] = []
    if (last := ray.train.get_checkpoint()) is not None:
        with last.as_directory() as found:
            states, losses = torch.load(Path(found, f"{rank}.pt"))
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    return losses


def save_checkpoint(rank: int, parts: tuple[Any, ...], losses: list[float]) -> None:
    """Save every rank's state through Ray's session."""
    with tempfile.TemporaryDirectory() as made:
        torch.save(([part.state_dict() for part in parts], losses), Path(made, f"{rank}.pt"))
        ray.train.report({"steps": len(losses)}, ray.train.Checkpoint.from_directory(made))
