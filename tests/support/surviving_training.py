"""A training for evener launch that loses its second device midway and gets it back.

It trains in float64 with checkpoints. While the file `dead` exists, nothing computes on that
device.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from evener.torch import Split
from tests.support.torch_ranks import CASES, STEPS, compute, data, finish, model, optimizer

NAME = "clip adamw"
SECOND = "cpu-1-of-2"


def die(mark: Path, device: str) -> None:
    """Kill this process, once and only on this device, with a signal that can't be caught."""
    if os.environ["EVENER_DEVICE"] == device and not mark.exists():
        mark.touch()
        dead = mark.with_name("dead")
        dead.touch() if device == SECOND else dead.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    """Train as a user's script would that names the plan, with a checkpoint every second step."""
    case, checkpoint = CASES[NAME], folder / "checkpoint.pt"
    split = Split("plan.toml", journal=True)
    net = model(case)
    wrapped, update, loader = (
        split.wrap(net),
        optimizer(case, net),
        split.loader(data(case), seed=2),
    )
    losses: list[float] = []
    rows: list[torch.Tensor] = []  # of all ranks
    shares: list[tuple[int, ...]] = []
    if checkpoint.exists():
        states, losses, rows, shares = torch.load(checkpoint)
        for part, state in zip((net, update, split), states, strict=True):
            part.load_state_dict(state)
    while len(losses) < STEPS:
        for batch in loader:
            losses.append(compute(case, split, wrapped, batch))
            rows.append(split.gather(batch[0]))
            shares.append(split.shares)
            finish(case, len(losses) - 1, wrapped, update)
            if len(losses) % 2 == 0 and split.rank == 0:
                states = [part.state_dict() for part in (net, update, split)]
                torch.save((states, losses, rows, shares), folder / "new.pt")
                (folder / "new.pt").replace(checkpoint)
            if len(losses) == 5:
                die(folder / "first", SECOND)
            if len(losses) == 13 and split.world == 1:
                die(folder / "second", "cpu-0-of-2")
            if len(losses) == STEPS:
                break
    learned = [weights.detach() for weights in net.parameters()]
    torch.save((learned, losses, rows, shares), folder / f"{split.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(
        0
        # a gloo thread may abort the process while Python exits
        # (github.com/pytorch/pytorch/issues/190489)
    )
