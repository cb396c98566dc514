"""Run by evener launch or torchrun: trains in float64 by the plan, and saves what this rank learned, for its host."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from evener.errors import PlanError
from evener.plan import load_plan
from evener.torch_split import Split
from tests.support.torch_ranks import CASES, STEPS, compute, data, finish, model, optimizer

NAME = "clip adamw"


def refusal(variables: dict[str, str], **options: Any) -> str:
    """What a split says before it waits for anything; every rank calls it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        Split(*sys.argv[2:], **options)
    except PlanError as fault:
        return str(fault)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ""


if __name__ == "__main__":
    first = load_plan(os.environ.get("EVENER_PLAN") or sys.argv[2]).layout.active[0]
    place = {"EVENER_HOST": first.host, "EVENER_DEVICE": first.device}
    said = [refusal(place), refusal({}, global_batch=8 + int(os.environ["RANK"]) % 2)]
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
    found = {"said": said, "rows": split.shares[split.rank], "host": os.environ["EVENER_HOST"]}
    torch.save({**learned, **found}, Path(sys.argv[1]) / f"{split.rank}.pt")
