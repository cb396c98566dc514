"""A DDP program that stops for a test to look at it: once its ranks have met in a store, and while
they train. `python meeting_program.py FOLDER`.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evener

FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]
SECONDS = 120


def show(stage: str) -> None:
    """Wait until the test has looked."""
    (FOLDER / f"{stage}-{RANK}").write_text(str(os.getpid()))
    end = time.monotonic() + SECONDS
    while not (FOLDER / f"{stage}-seen").exists():
        assert time.monotonic() < end, stage
        time.sleep(0.01)


def train(steps: int) -> float:
    """What all ranks have learned alike."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step))).sum().backward()
        optimizer.step()
    return float(sum(each.sum() for each in model.parameters()))


evener.load_plan(os.environ["EVENER_PLAN"])
store, _, world = next(dist.rendezvous("env://"))
store.set(RANK, "here")
store.wait([str(rank) for rank in range(world)])
show("met")
dist.init_process_group("gloo")
first = train(3)
show("trains")
dist.destroy_process_group()
dist.init_process_group("gloo")  # the second group must not read the addresses of the first
assert train(3) == first
dist.destroy_process_group()
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
own = dist.TCPStore(*address, world, RANK == "0")  # as a library that insists on a port
own.set(RANK, "here")
own.wait([str(rank) for rank in range(world)])
show("insists")
