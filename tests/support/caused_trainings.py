"""Two real ranks on a CPU that train with one known cause of delay each, and save their last
record.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import default_collate

from evener.live import reporter as live
from evener.live.files import LiveRecord
from evener.torch import Split
from evener.training.limits import LimitKind

STEPS, VALIDATION_BATCHES = 30, 12
WORK_SECONDS = 0.006  # seconds of a forward pass
CAUSES = (
    "plain",
    "plain, in two epochs",
    "loader",
    "collate",
    "disk of one rank",
    "unequal",
    "optimizer",
    "checkpoints",
    "validation",
    "validation between epochs",
    "logging",
    "own code",
    "cores",
)

FIRST = {
    "loader": LimitKind.INPUT,
    "collate": LimitKind.INPUT,
    "disk of one rank": LimitKind.RANK_INPUT,
    "unequal": LimitKind.UNEQUAL,
    "optimizer": LimitKind.OPTIMIZER,
    "checkpoints": LimitKind.CHECKPOINTS,
    "validation": LimitKind.VALIDATION,
    "validation between epochs": LimitKind.VALIDATION,
    "logging": LimitKind.BETWEEN,
    "own code": LimitKind.OWN_CODE,
}
PLAIN = ("plain", "plain, in two epochs")
SHORT_EPOCHS = "short epochs"  # as many as of "validation between epochs", without validation


def compute(seconds: float) -> None:
    """Compute for these seconds of this thread's CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Rows(torch.utils.data.Dataset):
    """Rows that each take a while to read."""

    def __init__(self, rows: int, seconds: float) -> None:
        self._rows, self._seconds = rows, seconds

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Any:
        time.sleep(self._seconds)
        return torch.full((8,), float(row)), row % 2


class Network(torch.nn.Module):
    """A layer whose forward pass computes and sleeps for a while."""

    def __init__(self, work_s: float, sleep_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self._work_s, self._sleep_s = work_s, sleep_s

    def forward(self, inputs: Any) -> Any:
        compute(self._work_s)
        time.sleep(self._sleep_s)
        return self.layer(inputs)


class Optimizer(torch.optim.SGD):
    """SGD whose step takes a while."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        compute(self.seconds)
        return super().step(closure)


def train_all(folder: Path, rank: int) -> None:
    """Train with each cause, and save the last record of each training."""
    torch.set_num_threads(1)
    live.CORE_SECONDS = 0.2
    records = {cause: train(cause, folder, rank, STEPS) for cause in CAUSES}
    torch.save(records, folder / f"{rank}.pt")


def train(cause: str, folder: Path, rank: int, steps: int) -> bytes:
    """Train for a number of steps with one cause of delay, and return the rank's last record."""
    kept = folder / f"{cause} {rank}"
    kept.mkdir(parents=True)
    os.environ["EVENER_RECORDS"] = str(kept)
    with _others(cause, rank):
        _loop(cause, folder, rank, steps)
    del os.environ["EVENER_RECORDS"]
    (path,) = kept.glob("*.json")
    return path.read_bytes()


def _loop(cause: str, folder: Path, rank: int, steps: int) -> None:
    split = Split(ratios=(1, 1), global_batch=8)
    more = 0.02 if cause == "unequal" else 0.0
    sleep_s = 0.02 if cause == "own code" else 0.0
    model = split.wrap(Network(WORK_SECONDS + more * rank, sleep_s))
    optimizer = Optimizer(model.parameters(), 0.1)
    optimizer.seconds = 0.01 if cause == "optimizer" else 0.0
    slow = cause == "loader" or (cause == "disk of one rank" and rank == 1)

    def collate(rows: Any) -> Any:
        compute(0.015 if cause == "collate" else 0.0)
        return default_collate(rows)

    short = cause in ("validation between epochs", SHORT_EPOCHS)
    epochs = steps // 6 if short else {"plain, in two epochs": 2}.get(cause, 1)
    rows = Rows(steps // epochs * 8, 0.004 if slow else 0.0)
    loader = split.loader(rows, collate_fn=collate)
    held_back = split.loader(Rows(VALIDATION_BATCHES * 8, 0.0), training=False)
    for _ in range(epochs):
        for step, (inputs, labels) in enumerate(loader):
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if cause == "checkpoints" and step % 10 == 4 and rank == 0:
                torch.save((model.state_dict(), torch.zeros(1 << 18)), folder / "checkpoint.pt")
                time.sleep(0.25)  # a slow disk
            if cause == "validation" and step % 10 == 9:
                _validate(model, held_back)
            if cause == "logging":
                compute(0.01)
        if cause == "validation between epochs":
            _validate(model, held_back)
    split.reporter.close()


@torch.no_grad()
def _validate(model: Any, loader: Any) -> None:
    model.eval()
    for inputs, _ in loader:
        model(inputs)
    model.train()


@contextmanager
def _others(cause: str, rank: int) -> Iterator[None]:
    """Run two other programs on this rank's core, if cores are the cause."""
    if cause != "cores":
        yield
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    spin = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(2)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()
        os.sched_setaffinity(0, before)


def read_record(content: bytes) -> LiveRecord:
    """Return a record that a rank saved."""
    return msgspec.json.decode(content, type=LiveRecord)
