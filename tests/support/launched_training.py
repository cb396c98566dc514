"""Run by evener launch or torchrun: trains in float64 by the plan, and saves what this rank
learned.

The file is named after its host.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from evener.errors import PlanError
from evener.plan.file import load_plan
from evener.torch import Split
from tests.support.torch_ranks import CASES, STEPS, compute, data, finish, model, optimizer

NAME = "clip adamw"


def refusal(variables: dict[str, str], *plan: str, **options: Any) -> str:
    """Return the error that a split raises before it waits for anything; every rank calls this."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        Split(*(plan or sys.argv[2:]), **options)
    except PlanError as fault:
        return str(fault)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ""


def save(
    folder: Path, split: Split, net: Any, update: Any, loader: Any, losses: list[float]
) -> None:
    """Save a checkpoint. After the ninth, the rank with the fewest rows is killed once."""
    if split.rank == 0:
        parts = [part.state_dict() for part in (net, update, loader)]
        torch.save((parts, losses), folder / "new.pt")
        (folder / "new.pt").rename(folder / "checkpoint.pt")
    if (
        len(losses) == 9
        and split.shares[split.rank] == min(split.shares)
        and not (folder / "killed").exists()
    ):
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def resume(folder: Path, *parts: Any) -> list[float]:
    """Load the checkpoint, if there is one, and return the losses up to it."""
    losses: list[float] = []
    if (folder / "checkpoint.pt").exists():
        states, losses = torch.load(folder / "checkpoint.pt")
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    return losses


if __name__ == "__main__":
    first = load_plan(os.environ.get("EVENER_PLAN") or sys.argv[2]).layout.active[0]
    place = {"EVENER_HOST": first.host, "EVENER_DEVICE": first.device}
    said = [refusal(place), refusal({}, global_batch=8 + int(os.environ["RANK"]) % 2)]
    said.append(refusal({}, *(["nowhere.toml"] if os.environ["RANK"] == "1" else [])))
    folder, case, split = Path(sys.argv[1]), CASES[NAME], Split(*sys.argv[2:])
    net = split.wrap(model(case))
    update, loader = optimizer(case, net), split.loader(data(case), seed=2)
    losses = resume(folder, net, update, loader)
    while len(losses) < STEPS:
        for batch in loader:
            losses.append(compute(case, split, net, batch))
            finish(case, len(losses) - 1, net, update)
            if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
                save(folder, split, net, update, loader, losses)
            if len(losses) == STEPS:
                break
    learned = {"weights": [weights.detach() for weights in net.parameters()], "losses": losses}
    found = {"said": said, "rows": split.shares[split.rank], "host": os.environ["EVENER_HOST"]}
    torch.save({**learned, **found}, folder / f"{split.rank}.pt")
    os._exit(
        0
        # a thread of gloo may abort a process while Python exits
        # (github.com/pytorch/pytorch/issues/190489)
    )
