"""A DDP program that pauses for a test to inspect it, after its ranks have met and in training.

Run it as `python rendezvous_program.py FOLDER`.
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
    """Wait until the test has inspected this stage."""
    (FOLDER / f"{stage}-{RANK}").write_text(str(os.getpid()))
    end = time.monotonic() + SECONDS
    while not (FOLDER / f"{stage}-seen").exists():
        assert time.monotonic() < end, stage
        time.sleep(0.01)


def train(steps: int) -> float:
    """Return the weight that all ranks have learned."""
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
own = dist.TCPStore(*address, world, RANK == "0")  # like a library that insists on its own port
own.set(RANK, "here")
own.wait([str(rank) for rank in range(world)])
show("insists")
