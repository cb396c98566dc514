"""Real ranks that do what tests/support/made_trainings.py invents: wait for data, pause,
or hang.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from evener.live import reporter as live
from evener.live.reporter import read_trainings
from evener.torch import Split
from tests.support.torch_program_parts import data, network

PAUSE_SECONDS = 0.04
WAIT_SECONDS = 60.0


class _SlowRows(torch.utils.data.Dataset):
    def __init__(self, seconds: float) -> None:
        self._data, self._seconds = data(96), seconds

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> Any:
        time.sleep(self._seconds / 4)
        return self._data[row]


def paused(folder: Path, rank: int) -> None:
    """Train with pauses on rank 1: for data, in its own work, before or after the
    optimizer's step.
    """
    torch.set_num_threads(1)
    live.INTERVAL_SECONDS, live.COST_LIMIT = 0.0, 1.0
    found = {where: _train(where if rank else "") for where in ("input", "own", "before", "after")}
    torch.save(found, folder / f"{rank}.pt")


def _train(pauses: str) -> Any:
    split = Split(ratios=(1, 1), global_batch=8)
    model = split.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in split.loader(_SlowRows(PAUSE_SECONDS if pauses == "input" else 0.0)):
        time.sleep(PAUSE_SECONDS * (pauses == "own"))
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        time.sleep(PAUSE_SECONDS * (pauses == "before"))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE_SECONDS * (pauses == "after"))
    return msgspec.to_builtins(_end(split))


def _end(split: Split) -> Any:
    (own,) = (each for each in read_trainings() if each.pid == os.getpid())
    split.reporter.close()
    return own


def held(folder: Path, rank: int) -> None:
    """Let rank 1 hang in its own work, between two steps or stopped, and save what rank 0 sees of
    both.
    """
    torch.set_num_threads(1)
    live.INTERVAL_SECONDS, live.COST_LIMIT, live.WATCH_SECONDS, live.LATE_SECONDS = (
        0.0,
        1.0,
        0.05,
        0.3,
    )
    seen = {where: _hold(folder, rank, where) for where in ("own work", "between steps", "stopped")}
    torch.save(seen, folder / f"{rank}.pt")


def _hold(folder: Path, rank: int, where: str) -> Any:
    """Train until rank 1 hangs; a separate process watches for rank 0, which then hangs too."""
    split = Split(ratios=(1, 1), global_batch=8)
    model = split.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dist.barrier()
    watcher = 0 if rank else _watch(folder / f"{where}.json", where)
    for step, (inputs, labels) in enumerate(split.loader(data(48))):
        _stay(folder, where, rank == 1 and step == 4 and where != "between steps")
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        _stay(folder, where, rank == 1 and step == 4 and where == "between steps")
    if watcher:
        assert not os.waitpid(watcher, 0)[1]
    split.reporter.close()
    return None if rank else (folder / f"{where}.json").read_bytes()


def _stay(folder: Path, where: str, here: bool) -> None:
    """Hang until the watching process has seen it."""
    if here and where == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_SECONDS
    while here and not (folder / f"{where}.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _watch(path: Path, where: str) -> int:
    """Start a process that saves the live files of both ranks once rank 0 waits.

    It lets a stopped rank continue.
    """
    if child := os.fork():
        return child
    code = 1
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while code and time.monotonic() < deadline:
            ranks = {each.rank: each for each in read_trainings() if each.world == 2}
            told = {rank: each.doing for rank, each in ranks.items()}
            if (
                told == {0: "sum", 1: "" if where == "stopped" else where}
                and ranks[1].late_seconds(time.time()) > 1
            ):
                path.with_suffix(".tmp").write_bytes(msgspec.json.encode([ranks[0], ranks[1]]))
                path.with_suffix(".tmp").rename(path)
                code = 0
            time.sleep(0.05)
        if where == "stopped":
            os.kill(ranks[1].pid, signal.SIGCONT)
    finally:
        os._exit(code)
