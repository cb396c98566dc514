"""Ranks of which one ends early while the other goes on training.

As a script, with how it ends and by which trainer as arguments (HOW WAY), it is such a rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from evener.system.replaced import replaced
from evener.torch import Split
from evener.torch.ranks import peers

WIDTH, BATCHES, ENDS_IN = 256, 12, 6


class Raise(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(_: Any, __: torch.Tensor) -> torch.Tensor:
        raise OSError("No space left on device")


class Net(nn.Module):
    """A few layers, whose backward pass may raise an error at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fails = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        made: torch.Tensor = self.last(Raise.apply(hidden) if self.fails else hidden)
        return made


def end(how: str, net: Net) -> None:
    """End this rank in the given way."""
    if how == "raises":
        raise OSError("No space left on device")
    if how == "exits":
        sys.exit(3)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    net.fails = how == "raises in backward"


def make_rows() -> TensorDataset:
    """Return the data set, the same on both ranks."""
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16 * BATCHES, WIDTH, generator=drawn))


def train(how: str) -> None:
    """Train in a loop that the second rank leaves early."""
    split = Split(ratios=[1, 1], global_batch=16)
    model = split.wrap(Net())
    for number, (rows,) in enumerate(split.loader(make_rows()), 1):
        if split.rank and number == (BATCHES if how == "leaves out the last" else ENDS_IN):
            end(how, model.module)
            if how in ("breaks", "leaves out the last"):
                break
        model(rows.to(split.device)).square().mean().backward()


def train_in_lightning(how: str) -> None:
    """Train the same with Lightning."""
    import lightning as L  # noqa: N812 - the name that its documentation uses

    split = Split(ratios=[1, 1], global_batch=16)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if split.rank and number == ENDS_IN - 1:
                end(how, self.net)
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(
        strategy=split.strategy(), use_distributed_sampler=False, max_epochs=1, devices=2, **quiet
    )
    trainer.fit(Module(), split.loader(make_rows()))


def wait_for(folder: Path, rank: int, how: str) -> None:
    """Save what the first rank prints, and its exit code, when the second one has left.

    It waits for that one, or goes on without it; gloo takes the place of NCCL.
    """
    torch.set_num_threads(1)
    split, said = Split(ratios=[1, 1], global_batch=4), list[str]()
    known = peers.PeerWatcher.newest
    assert known is not None
    dist.all_reduce(torch.ones(1))
    if rank:
        if how == "is interrupted":
            peers.explain_failure(KeyboardInterrupt())
        else:
            known.note("OSError: No space left on device" if how == "raises" else "")
        torch.save(said, folder / "1.pt")
        with suppress(RuntimeError):  # the store ends with the first rank
            dist.distributed_c10d._get_default_store().wait(["over"])
        return

    def leave(code: int) -> None:
        torch.save([*said, code], folder / "0.pt")
        exit_now(0)

    exit_now = os._exit
    vars(os)["_exit"] = leave
    vars(peers)["print_line"] = said.append
    peers.WAIT_SECONDS, peers.LOOK_SECONDS = 0.3, 0.05
    known._thread.start()
    if how == "works alone":
        time.sleep(1)
        leave(0)
    hangs = how in ("raises", "is interrupted")
    known._wait_for_gpu = lambda: MagicMock(is_alive=lambda: hangs)  # type: ignore[method-assign]
    if how == "leaves":
        vars(peers)["is_leaving"] = lambda: True
    if how in ("breaks", "leaves"):
        dist.all_reduce(torch.ones(1))
    time.sleep(60)
    split.close()


def train_often(folder: Path, rank: int, trainings: int) -> None:
    """Train several times in this process, each time with a process group of its own.

    The first rank comes late to each group, so the other one looks for its address before.
    """

    def make_late(*arguments: Any, **options: Any) -> None:
        time.sleep(0.3 * (rank == 0))
        make_group(*arguments, **options)

    sums = []
    make_group = dist.init_process_group
    for _ in range(trainings):
        with replaced(dist, "init_process_group", make_late):
            split = Split(ratios=(1, 1), global_batch=4, rebalance=False)
        ranks = torch.tensor([rank + 1.0])
        dist.all_reduce(ranks)
        sums.append(float(ranks))
        split.close()
    torch.save(sums, folder / f"{rank}.pt")


if __name__ == "__main__":
    _, how, way = sys.argv
    try:
        (train_in_lightning if way == "lightning" else train)(how)
    finally:
        if way == "destroys":
            dist.destroy_process_group()
