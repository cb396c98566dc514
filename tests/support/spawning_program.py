"""A program that starts its own processes, as in PyTorch's tutorials.

Run it as `python spawning_program.py PORT OUT`.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD = 2


def train(rank: int, port: str, out: str) -> None:
    """Train as one of the processes, and save the learned weights."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for inputs, labels in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        rows.append(len(inputs))
    weights = [each.tolist() for each in model.parameters()]
    torch.save({"weights": weights, "rows": rows, "RANK": os.environ.get("RANK")}, f"{out}{rank}")


if __name__ == "__main__":
    port, out = sys.argv[1:]
    torch.multiprocessing.spawn(train, args=(port, out), nprocs=WORLD)
