"""Run by evener launch or torchrun: trains in float64 by the plan, and saves what this rank learned, for its host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from evener.torch_split import Split
from tests.support.torch_ranks import CASES, STEPS, compute, data, finish, model, optimizer

NAME = "clip adamw"

if __name__ == "__main__":
    case, split = CASES[NAME], Split(*sys.argv[2:])
    net = split.wrap(model(case))
    update, loader = optimizer(case, net), split.loader(data(case), seed=2)
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in loader:
            losses.append(compute(case, split, net, batch))
            finish(case, len(losses) - 1, net, update)
            if len(losses) == STEPS:
                break
    learned = {"weights": [weights.detach() for weights in net.parameters()], "losses": losses}
    place = {"rows": split.shares[split.rank], "host": os.environ["EVENER_HOST"]}
    torch.save({**learned, **place}, Path(sys.argv[1]) / f"{split.rank}.pt")
