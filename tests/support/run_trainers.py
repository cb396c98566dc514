"""Programs with trainers of libraries, which `evener run` trains with the plan's shares.

The losses of some depend on the rank or on other ranks, which shows only later.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from tests.support.huggingface_programs import make_arguments, make_parts
from tests.support.lightning_programs import Program, make_trainer, points
from tests.support.run_parts import BATCH, Programs
from tests.support.trainer_audit_programs import PLAIN, ROWS, Late, LateMoments, split_rows

PROGRAMS: Programs = {}


def train_huggingface(kind: Any, splits: bool = False) -> Any:
    """Train with a Trainer of transformers as one process of two.

    With `splits`, each rank draws its own part of the rows.
    """
    parts = make_parts(PLAIN)
    if splits:
        parts["train_dataset"] = split_rows(parts["train_dataset"], dist.get_rank())
    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(PLAIN, folder, per_device_train_batch_size=BATCH)
        kind(args=arguments, **parts).train()
    return parts["model"]


def train_lightning(kind: Any, splits: bool = False) -> Any:
    """Train with Lightning's own strategy as one process of two.

    With `splits`, each rank draws its own part of the rows.
    """
    rows = split_rows(points(ROWS), dist.get_rank()) if splits else points(ROWS)
    module = kind()
    module.layers[1].p = 0.0  # no dropout, as each rank draws its own
    # Lightning removes the process group's variables at the end
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        trainer = make_trainer(
            Program(),
            folder,
            devices=2,
            strategy="ddp",
            max_epochs=3,
            use_distributed_sampler=True,
        )
        trainer.fit(module, DataLoader(rows, batch_size=BATCH))
    return module


class PlainMoments(LateMoments):
    """Without dropout, as each rank draws its own."""

    dropout = 0.0


def gather(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss weighted by the mean of the ranks' losses."""
    every = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(every, loss.detach())
    return loss * (1 + torch.stack(every).mean())


class Gathering(PlainMoments):
    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return gather(F.mse_loss(predicted, targets))


class GatheringModule(Late):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return gather(F.mse_loss(self.head(self.layers(batch[0])), batch[1]))


PROGRAMS["a trainer that gathers"] = lambda: train_huggingface(Gathering)
PROGRAMS["a module that gathers"] = lambda: train_lightning(GatheringModule)
PROGRAMS["a trainer"] = lambda: train_huggingface(PlainMoments)
PROGRAMS["a module"] = lambda: train_lightning(Late)


class Ranked(PlainMoments):
    """Weights its loss by its rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.importance = torch.tensor([1.0, 3.0])[self.args.process_index]

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.importance * F.mse_loss(predicted, targets)


class RankedModule(Late):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.head(self.layers(batch[0])), batch[1])
        return loss * (3.0 if self.global_rank else 1.0)


class Shared(PlainMoments):
    """Weights its loss by the ranks' mean of the previous loss, which a callback computes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weight = 1.0
        self.add_callback(MeanOfRanks(self))

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(predicted, targets)
        self.last = loss.detach()
        return loss * self.weight


class MeanOfRanks(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        mean = self.trainer.last.clone()
        dist.all_reduce(mean)
        self.trainer.weight = 1.0 / (1.0 + float(mean))


class SharedModule(Late):
    weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.head(self.layers(batch[0])), batch[1])
        self.last = loss.detach()
        return loss * self.weight

    def on_train_batch_end(self, *_: Any) -> None:
        mean = self.last.clone()
        dist.all_reduce(mean)
        self.weight = 1.0 / (1.0 + float(mean))


PROGRAMS["a trainer whose ranks weigh otherwise"] = lambda: train_huggingface(Ranked)
PROGRAMS["a module whose ranks weigh otherwise"] = lambda: train_lightning(RankedModule)
PROGRAMS["a trainer with the ranks' last loss"] = lambda: train_huggingface(Shared)
PROGRAMS["a module with the ranks' last loss"] = lambda: train_lightning(SharedModule)
PROGRAMS["a trainer of rows split on each rank"] = lambda: train_huggingface(Trainer, splits=True)
PROGRAMS["a module of rows split on each rank"] = lambda: train_lightning(Late, splits=True)
