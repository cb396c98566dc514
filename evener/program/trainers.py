"""A trainer of transformers, or of what builds on it, made one that trains by shares as its training begins."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from .program import PROGRAM, taken_over


def train(wrapped: Any, trainer: Any, arguments: Any, keywords: Any) -> Any:
    """Have a Trainer train by shares."""
    with PROGRAM.left_alone():
        if (os.environ.get("WORLD_SIZE") == "1" or dist.is_initialized()) and not hasattr(trainer, "_planned"):
            _plan(trainer)
        return wrapped(*arguments, **keywords)


def _plan(trainer: Any) -> None:
    """Make the trainer's class one that trains by shares, or say why it stays what it is."""
    own, settings = type(trainer), PROGRAM.notebook.settings
    world = trainer.args.world_size
    global_batch = trainer._train_batch_size * world
    with taken_over(trainer):
        from ..huggingface import with_plan

        planned = with_plan(
            own, global_batch=global_batch, journal=True, rebalance=settings.rebalance, noise=settings.noise
        )
        planned.__name__, planned.__qualname__ = own.__name__, own.__qualname__  # which programs print
        trainer.__class__ = planned
        trainer.begin_plan()
        trainer.get_train_dataloader()
        trainer.check_loss()
        if world > 1:
            _tell_of_tail(trainer, global_batch)
        PROGRAM.notebook.watch(trainer._planned, f"{own.__name__}, a transformers.Trainer")


def _tell_of_tail(trainer: Any, global_batch: int) -> None:
    """Say that an epoch's last batch is shorter than the program's own launcher makes it."""
    rows = len(trainer.train_dataset)
    if rows % global_batch and not trainer.args.dataloader_drop_last:
        PROGRAM.notebook.warn(
            f"the last batch of an epoch has the {rows % global_batch} rows that are left of {rows}; by even shares it"
            f" would be filled up to {global_batch} with rows seen before"
        )
