"""The model of benchmarks.trainers for Lightning."""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning as L  # noqa: N812 - as its documentation writes it
import torch
from torch.utils.data import DataLoader

from benchmarks.trainer_models import COLLATED, Done, Texts, network
from evener.plan.file import Plan
from evener.torch import Split


class Module(L.LightningModule):
    """The model as a LightningModule."""

    def __init__(self, size: str, done: Done = lambda: False) -> None:
        super().__init__()
        self.model = network(size)
        self._done = done

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean loss over tokens."""
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, like the other trainers."""
        return torch.optim.AdamW(self.parameters(), 5e-5)

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop training if it is done."""
        self.trainer.should_stop = self._done()


def build_lightning(size: str = "small") -> Any:
    """Return the module and its data."""
    return Module(size), Texts(size)


def train(plan: Plan | None, options: argparse.Namespace, done: Done) -> None:
    """Train with `lightning.Trainer`."""
    split = Split(plan) if plan else None
    world = int(os.environ.get("WORLD_SIZE", 1))
    strategy: Any = "ddp" if world > 1 else "auto"
    if split:
        strategy = split.strategy()
    trainer = L.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=world,
        strategy=strategy,
        use_distributed_sampler=split is None,
        precision="bf16-mixed" if options.bf16 else "32-true",
        max_epochs=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Texts(options.size)
    loader = (
        split.loader(data, **COLLATED)
        if split
        else DataLoader(data, options.bare, shuffle=True, **COLLATED)
    )
    trainer.fit(Module(options.size, done), loader)
