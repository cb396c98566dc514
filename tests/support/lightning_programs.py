"""Trainings by Lightning that one process and several ranks must end with the same weights.

RANK=0 WORLD_SIZE=2 ... python lightning_programs.py result.pt SHARE[:MICRO] ...
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
import torch
from torch.utils.data import DataLoader, TensorDataset

from evener.torch_split import Split
from tests.support.huggingface_programs import SEED, Ordered, Points, make_plan

EPOCHS = 3


class Program(msgspec.Struct, frozen=True):
    """One training; `options` are the trainer's."""

    rows: int = 41  # five full batches and one of a single row
    options: dict[str, Any] = {}
    manual: bool = False
    validate: bool = False
    resume_after: int = 0  # optimizer steps


PROGRAMS = {
    "plain": Program(options={"gradient_clip_val": 0.5}),
    "accumulated": Program(45, {"accumulate_grad_batches": 2}),
    "validated": Program(45, validate=True),
    "manual": Program(manual=True),
    "resumed": Program(45, resume_after=8),
}


class Module(pl.LightningModule):
    """Two layers; logs its loss over the epoch."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("held out", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def points(rows: int) -> TensorDataset:
    """The same rows as of the plain model of transformers' programs."""
    data = Points(rows)
    return TensorDataset(data.x, data.y)


def make_trainer(program: Program, folder: str, **options: Any) -> pl.Trainer:
    """A quiet trainer on CPUs."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "default_root_dir": folder}
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        **{**quiet, **saves, **program.options, **options},
    )


def describe(module: Module, trainer: pl.Trainer) -> dict[str, Any]:
    """What a training ended with."""
    weights = [tensor.detach().clone() for tensor in module.state_dict().values()]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "steps": trainer.global_step, "metrics": metrics}


def train(program: Program, split: Any, folder: str) -> dict[str, Any]:
    """By the strategy of a split; if it stops on the way, the rest by another trainer."""

    def fit(path: str | None = None, **options: Any) -> tuple[Module, pl.Trainer]:
        trainer = make_trainer(program, folder, devices=split.world, strategy=split.strategy(), **options)
        module = Module(program.manual)
        loader = split.loader(points(program.rows), seed=SEED)
        held_out = split.loader(points(16), shuffle=False, training=False) if program.validate else None
        trainer.fit(module, loader, held_out, ckpt_path=path)
        return module, trainer

    if not program.resume_after:
        return describe(*fit())
    saves = pl.callbacks.ModelCheckpoint(folder, "half", every_n_train_steps=program.resume_after, save_top_k=-1)
    fit(enable_checkpointing=True, callbacks=[saves])
    return describe(*fit(f"{folder}/half.ckpt"))


def reference(program: Program) -> dict[str, Any]:
    """By Lightning in this process."""
    module = Module(program.manual)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(program, folder, devices=1)
        loader = DataLoader(points(program.rows), batch_sampler=Epochs(program.rows))
        held_out = DataLoader(points(16), batch_size=8) if program.validate else None
        trainer.fit(module, loader, held_out)
        return describe(module, trainer)


class Epochs(Ordered):
    """Lightning sets the epoch of a batch sampler's own sampler."""

    @property
    def sampler(self) -> Ordered:
        return self


def main() -> None:
    """Train every program as one rank."""
    torch.set_num_threads(1)
    result, *given = sys.argv[1:]
    pairs = [tuple(map(int, one.split(":"))) for one in given]
    split = Split(make_plan(tuple(pair[0] for pair in pairs), tuple(pair[-1] for pair in pairs)))
    passes = any(share != micro for share, micro in zip(split.shares, split.micros, strict=True))
    found: dict[str, Any] = {
        name: train(program, split, str(Path(result).parent / name))
        for name, program in PROGRAMS.items()
        if not (program.manual and passes)
    }
    accelerate = import_module("tests.support.accelerate_programs")  # which has rows and epochs from here
    split = Split(split.plan)  # as loops of one's own have it
    for name in accelerate.LOOPS:
        if name == "in passes" or not passes:
            found[f"accelerate, {name}"] = accelerate.train(name, split)
    found["accelerate, refused"] = accelerate.refuse(split)
    torch.save(found, result)


if __name__ == "__main__":
    main()
