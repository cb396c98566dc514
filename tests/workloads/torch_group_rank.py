"""Rank functions for a RankServer that train a workload, in a group or alone.

A rank of a group saves the weights after each size; in a single process nothing else has used
memory before.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from evener.torch.ranks.own_work import HostClock
from evener.workloads import registry
from evener.workloads.protocol import WorkerSetup
from evener.workloads.torch_backend.batches import Data
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload, Waits

SIZES = ((6, 2, 3), (1, 5, 2), (4, 0, 4), (6, 2, 3))  # the middle rank is left out in the third
MICROS = ((2, 2, 3), (), (4, 0, 1), (5, 1, 2))
STEPS = 5
PAUSE_SECONDS = 0.03  # pause of the first rank before a step
ROWS = 28  # two or three full batches per epoch


def recipe() -> Recipe:
    module = torch.nn.Sequential(
        torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)
    ).double()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    return Recipe(
        module, optimizer, torch.nn.CrossEntropyLoss(), Data(TensorDataset(*sample_batch(ROWS)))
    )


def sample_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 7, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (rows,), generator=generator)


def train(folder: Path, rank: int) -> None:
    peers = (f"127.0.0.1:{os.environ['MASTER_PORT']}",) * len(SIZES[0])
    workload = TorchWorkload(WorkerSetup(("CPU:0",), rank=rank, peers=peers, threads=1), recipe)
    ended: list[Any] = []
    for sizes, micro in zip(SIZES, MICROS, strict=True):
        workload.prepare(sizes, micro)
        for _ in range(STEPS):
            workload.step()
        workload.synchronize()
        ended.append([weights.detach().clone() for weights in workload.recipe.module.parameters()])
    waits = Waits(workload._model.exchange, HostClock())
    for _ in range(STEPS):
        time.sleep(PAUSE_SECONDS if rank == 0 else 0.0)
        workload.step()
    waited = {
        "waited": waits.read(),
        "waited since": waits.read(),
        "on a CPU": workload.read_waits(),
    }
    torch.save({"weights": ended, "facts": dict(workload.facts()), **waited}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def save_peaks(folder: Path, rank: int) -> None:
    """Save the peak memory in bytes of a step of 16 rows, of 512 and of 16 again."""
    workload = registry.build("torch_mnist", WorkerSetup(("CPU:0",), threads=1), {}, "torch")
    peaks: list[int | None] = []
    for rows in (16, 512, 16):
        workload.prepare((rows,))
        workload.step()
        peaks += workload.max_memory_bytes()
    torch.save(peaks, folder / f"{rank}.pt")
