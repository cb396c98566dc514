"""Trainers of libraries that `evener run` trains by shares, and whose losses change later."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import DataLoader

from tests.support.huggingface_programs import make_arguments, make_parts
from tests.support.lightning_programs import Program, make_trainer, points
from tests.support.run_parts import BATCH, Programs
from tests.support.trainer_audit_programs import PLAIN, ROWS, Late, LateMoments

PROGRAMS: Programs = {}


def train_huggingface(kind: Any) -> Any:
    """The bare trainer in a process of two."""
    parts = make_parts(PLAIN)
    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(PLAIN, folder, per_device_train_batch_size=BATCH)
        kind(args=arguments, **parts).train()
    return parts["model"]


def train_lightning(kind: Any) -> Any:
    """The bare trainer in a process of two."""
    module = kind()
    module.layers[1].p = 0.0  # its draws are a rank's own
    # Lightning takes its variables of the group away at the end
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        trainer = make_trainer(
            Program(),
            folder,
            devices=2,
            strategy="ddp",
            max_epochs=3,
            use_distributed_sampler=True,
        )
        trainer.fit(module, DataLoader(points(ROWS), batch_size=BATCH))
    return module


class PlainMoments(LateMoments):
    """Without dropout, whose draws are a rank's own."""

    dropout = 0.0


def gather(loss: torch.Tensor) -> torch.Tensor:
    """A loss with a weight by the mean of the ranks' losses."""
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
