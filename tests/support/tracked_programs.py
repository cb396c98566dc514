"""Trainings that log evener's metrics to trackers, through their trainers' loggers.

tests/support/rank_server.py runs the functions that take a folder and a rank.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TrackioCallback

import evener
from evener.huggingface import report, with_plan
from evener.lightning import Report
from evener.live.files import read_trainings
from evener.torch import Split
from tests.support.huggingface_programs import Plain, Points, make_plan
from tests.support.lightning_programs import Module, points

STEPS, STEP_SECONDS = 40, 0.03  # long enough for a second report from each rank
ROWS = 8


class Slow(Plain):
    """A model that is slow in each pass."""

    def forward(self, x: Any, y: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return super().forward(x, y)


class SlowModule(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        time.sleep(STEP_SECONDS)
        return super().training_step(batch, index)


class Tracker(TrainerCallback):
    """Keeps what a tracker's callback is given, among those named in `report_to`."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


class KeepingLogger(Logger):
    """Keeps what Lightning's loggers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    name = version = "kept"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logs.append({**metrics, "step": step})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def by_trainer(folder: Path, kind: Any = Trainer, trackers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a Trainer's logs: what its trackers got, what it printed, and its history."""
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        logging_steps=STEPS // 4,
        report_to=list(trackers),
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    tracker, printed, trackio = Tracker(), list[Any](), make_trackio()
    trainer = kind(
        model=Slow(), args=arguments, train_dataset=Points(ROWS * 20), callbacks=[tracker, trackio]
    )
    report(trainer)
    with mock.patch(
        "builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words)))
    ):
        trainer.train()
    return {
        "logs": tracker.logs,
        "printed": printed,
        "history": trainer.state.log_history,
        "trackio": [call.args[0] for call in trackio._trackio.log.call_args_list],
        "left": len(own_reports()),
    }


def make_trackio() -> Any:
    """Return transformers' own trackio callback with a module that keeps what it gets.

    The real trackio starts a server.
    """
    callback = TrackioCallback.__new__(TrackioCallback)
    callback._trackio, callback._space_id, callback._initialized = mock.MagicMock(), None, True
    return callback


def by_lightning(folder: Path, split: Any = None) -> dict[str, Any]:
    """Return what a Lightning trainer logged."""
    logger = KeepingLogger()
    options: dict[str, Any] = {}
    if split is not None:
        options = {
            "devices": split.world,
            "strategy": split.strategy(),
            "use_distributed_sampler": False,
        }
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=logger,
        callbacks=[Report()],
        max_steps=STEPS,
        log_every_n_steps=STEPS // 4,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        **options,
    )
    data = points(ROWS * 20)
    if split is None:
        loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    else:
        loader = split.loader(data)
    trainer.fit(SlowModule(manual=False), loader)
    return {"logs": logger.logs, "left": len(own_reports())}


def own_reports() -> list[Any]:
    """Return what the monitor sees of this process."""
    return [each for each in read_trainings() if each.pid == os.getpid()]


def train_by_plan(folder: Path, rank: int) -> None:
    """Train with both trainers and a plan of 6 + 2 rows."""
    torch.set_num_threads(1)
    os.environ["EVENER_LIVE_DIR"] = str(folder / "live")
    plan = make_plan((6, 2))
    found = {
        "Trainer": by_trainer(folder, with_plan(Trainer, plan)),
        "Lightning": by_lightning(folder, Split(plan)),
    }
    torch.save(found, folder / f"{rank}.pt")


def train_without(folder: Path, rank: int, kept: str) -> None:
    """Train with both trainers and a loop without a plan, the first one with the installed
    trackers.
    """
    torch.set_num_threads(1)
    os.environ |= {
        "EVENER_LIVE_DIR": str(folder / "live"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": kept,
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{kept}/mlflow.db",
    }
    modules = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
    trackers = tuple(name for name, module in modules.items() if find_spec(module))
    found: dict[str, Any] = {"Trainer": by_trainer(Path(kept), trackers=trackers)}
    if "wandb" in trackers:
        # writes the remaining data, as a rank ends without exit hooks
        import_module("wandb").finish()
    found |= {"Lightning": by_lightning(folder), "loop": by_loop(), "trackers": trackers}
    torch.save(found, folder / f"{rank}.pt")


def by_loop() -> dict[str, Any]:
    """Return the last and the first metrics of a user's own loop."""
    first = evener.metrics()
    for _ in range(STEPS):
        time.sleep(STEP_SECONDS)
        evener.report(ROWS, workload="a loop")
        last = evener.metrics()
    return {"logs": [last], "first": first}
