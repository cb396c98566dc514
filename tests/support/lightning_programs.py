"""Lightning trainings that must end with the same weights on one process and on several ranks.

Others of them are refused. tests/support/rank_server.py runs the functions that take a folder and a
rank.
"""

from __future__ import annotations

import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import msgspec
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

from evener.errors import EvenerError
from evener.torch import Split
from tests.support.huggingface_programs import SEED, Ordered, Points, make_plan
from tests.support.scripted_shares import rotate_shares

EPOCHS = 2


class Program(msgspec.Struct, frozen=True):
    """One training; `options` are passed to the trainer."""

    rows: int = 17  # two full batches and one of a single row
    options: dict[str, Any] = {}
    manual: bool = False
    validate: bool = False
    resume_after: int = 0  # in optimizer steps
    rebalance: bool = False


PROGRAMS = {
    "plain": Program(options={"gradient_clip_val": 0.5}),
    "accumulated": Program(21, {"accumulate_grad_batches": 2, "precision": "64-true"}),
    "validated": Program(validate=True),
    "manual": Program(manual=True),
    "resumed": Program(29, resume_after=6),
    "rebalanced": Program(45, {"accumulate_grad_batches": 2, "max_epochs": 3}, rebalance=True),
}


class Module(pl.LightningModule):
    """Two layers; logs its mean loss over the epoch."""

    def __init__(self, manual: bool, normalize: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        between = torch.nn.BatchNorm1d(7) if normalize else torch.nn.Tanh()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 7), between, torch.nn.Linear(7, 1)
        ).double()
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
        self.log(
            "held out",
            torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]),
            sync_dist=True,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Iterates(Module):
    """Fetches its batches from the iterator itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])


def points(rows: int) -> TensorDataset:
    """Return the same rows as the plain model of transformers' programs has."""
    data = Points(rows)
    return TensorDataset(data.x, data.y)


def make_trainer(program: Program, folder: str, **options: Any) -> pl.Trainer:
    """Return a trainer that prints nothing, on GPUs if PyTorch sees any."""
    where = "gpu" if torch.cuda.is_available() else "cpu"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = {"enable_checkpointing": False, "num_sanity_val_steps": 0}
    own = {"max_epochs": EPOCHS, "use_distributed_sampler": False, "default_root_dir": folder}
    return pl.Trainer(accelerator=where, **{**quiet, **saves, **own, **program.options, **options})


def describe(module: Module, trainer: pl.Trainer) -> dict[str, Any]:
    """Return the weights and metrics at the end of a training."""
    weights = [tensor.detach().cpu().clone() for tensor in module.state_dict().values()]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "steps": trainer.global_step, "metrics": metrics}


def train(program: Program, split: Any, folder: str) -> dict[str, Any]:
    """Train with a split's strategy; if it stops early, another trainer without passes trains the
    rest.
    """

    def fit(split: Any, path: str | None = None, **options: Any) -> tuple[Module, pl.Trainer]:
        trainer = make_trainer(
            program, folder, devices=split.world, strategy=split.strategy(), **options
        )
        module = Module(program.manual)
        loader = split.loader(points(program.rows), seed=SEED)
        held_out = (
            split.loader(points(16), shuffle=False, training=False) if program.validate else None
        )
        trainer.fit(module, loader, held_out, ckpt_path=path)
        if held_out is not None:
            trainer.validate(module, held_out, verbose=False)
        return module, trainer

    if program.rebalance:
        rotate_shares(split.rebalancing)
    if not program.resume_after:
        return {**describe(*fit(split)), "changes": len(split.reporter.changes)}
    saves = pl.callbacks.ModelCheckpoint(
        folder, "half", every_n_train_steps=program.resume_after, save_top_k=-1
    )
    fit(split, enable_checkpointing=True, callbacks=[saves])
    return describe(*fit(Split(make_plan(split.shares[::-1])), f"{folder}/half.ckpt"))


def reference(program: Program) -> dict[str, Any]:
    """Train with Lightning alone in this process."""
    module = Module(program.manual)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(program, folder, devices=1)
        loader = DataLoader(points(program.rows), batch_sampler=Epochs(program.rows))
        held_out = DataLoader(points(16), batch_size=8) if program.validate else None
        trainer.fit(module, loader, held_out)
        if held_out is not None:
            trainer.validate(module, held_out, verbose=False)
        return describe(module, trainer)


class Epochs(Ordered):
    """An ordered batch sampler that is its own sampler, as Lightning sets the epoch of that one."""

    @property
    def sampler(self) -> Ordered:
        return self


def stop(split: Any, folder: str) -> tuple[int, int, bool]:
    """Send SIGTERM to the first rank in its third step.

    Returns the training's steps, how often Lightning asked whether to stop, and whether it ended.
    """
    asked, ask = list[Any](), _TrainingEpochLoop._broadcast_sigterm_tensor

    def note(loop: Any) -> None:
        asked.append(loop)
        ask(loop)

    class Ended(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if split.rank == 0 and batch_idx == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    trainer, ended = (
        make_trainer(Program(), folder, devices=split.world, strategy=split.strategy()),
        False,
    )
    with mock.patch.object(_TrainingEpochLoop, "_broadcast_sigterm_tensor", note):
        try:
            trainer.fit(Ended(False), split.loader(points(64)))
        except SIGTERMException:
            ended = True
    return trainer.global_step, len(asked), ended


def train_all(folder: Path, rank: int, shares: list[int], micros: list[int]) -> None:
    """Train every program as one rank, except manual optimization in several passes."""
    torch.set_num_threads(1)
    plan = make_plan(shares, micros)
    found: dict[str, Any] = {
        name: train(program, Split(plan, rebalance=program.rebalance), str(folder / name))
        for name, program in PROGRAMS.items()
        if not (program.manual and shares != micros)
    }
    if shares == micros:
        found["stopped"] = stop(Split(plan), str(folder / "stopped"))
    torch.save(found, folder / f"{rank}.pt")


def reference_all(folder: Path, rank: int) -> None:
    """Train every program in one process."""
    torch.set_num_threads(1)
    torch.save(
        {name: reference(program) for name, program in PROGRAMS.items()}, folder / f"{rank}.pt"
    )


def refuse_all(folder: Path, rank: int) -> None:
    """Save what is refused or warned about with a share in two passes, and repeat a training."""
    split = Split(make_plan((8,), (4,)))

    def fit(module: Module, loader: Any = None, **options: Any) -> str:
        trainer = make_trainer(
            Program(), str(folder), strategy=split.strategy(), devices=1, max_epochs=1, **options
        )
        data = split.loader(points(16)) if loader is None else loader
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                trainer.fit(module, data)
            except (
                EvenerError,
                MisconfigurationException,
            ) as error:  # the latter is raised by Lightning itself
                return str(error)
        return " ".join(str(each.message) for each in said)

    found: dict[str, Any] = {
        "manual": fit(Module(True)),
        "another loader": fit(Module(False), DataLoader(points(16), batch_size=8)),
        "shared out again": fit(Module(False), use_distributed_sampler=True),
        "normalized": fit(Module(False, normalize=True)),
        "batches of its own": fit(Iterates(False)),
        "finder": fit(Module(False), callbacks=[pl.callbacks.BatchSizeFinder()]),
        "accumulated": [],
    }
    trainer = make_trainer(
        Program(), str(folder), strategy=split.strategy(), devices=1, accumulate_grad_batches=2
    )
    for _ in range(2):
        trainer.fit(Module(False), split.loader(points(16)))
        found["accumulated"].append((trainer.accumulate_grad_batches, trainer.global_step))
    torch.save(found, folder / f"{rank}.pt")
