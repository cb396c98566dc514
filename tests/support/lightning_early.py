"""Lightning programs that query their trainer before training starts.

One process and several ranks must train them alike. tests/support/rank_server.py runs the functions
that take a folder and a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from evener.errors import EvenerError
from evener.torch import Split
from tests.support.fewer_audits import audit_first_step
from tests.support.huggingface_programs import SEED, make_plan
from tests.support.lightning_programs import Epochs, Module, Program, describe, make_trainer, points

ROWS = 29  # three full batches and one of five rows


class Asks(Module):
    """A module that keeps the trainer's answers, by the name of the question."""

    def __init__(self) -> None:
        super().__init__(manual=False)
        self.told: dict[str, Any] = {}

    def by_steps(self, make: Callable[[Any, int], Any], steps: int) -> Any:
        """Return AdamW with a learning rate schedule that counts steps."""
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = {"scheduler": make(optimizer, steps), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def one_cycle(optimizer: Any, steps: int) -> Any:
    return OneCycleLR(optimizer, 0.02, total_steps=steps)


def warm_up_and_cosine(optimizer: Any, steps: int) -> Any:
    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 3) * (1 + math.cos(math.pi * step / steps)) / 2

    return LambdaLR(optimizer, factor)


class OneCycle(Asks):
    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        self.told["steps"] = steps
        return self.by_steps(one_cycle, steps)


class WarmUp(Asks):
    """Counts the batches of the trainer's loader for its learning rate schedule."""

    def configure_optimizers(self) -> Any:
        self.trainer.fit_loop.setup_data()
        batches = len(self.trainer.train_dataloader)
        self.told["batches"] = batches, self.trainer.num_training_batches
        return self.by_steps(warm_up_and_cosine, batches * self.trainer.max_epochs)


class InSetup(Asks):
    def setup(self, stage: str) -> None:
        self.told["steps"] = int(self.trainer.estimated_stepping_batches)

    def configure_optimizers(self) -> Any:
        return self.by_steps(one_cycle, self.told["steps"])


class InConfigureModel(Asks):
    def configure_model(self) -> None:
        self.told["steps"] = int(self.trainer.estimated_stepping_batches)

    configure_optimizers = InSetup.configure_optimizers


class OwnLoader(Asks):
    """Asks its own train_dataloader for its length, so that the loader is made twice."""

    def configure_optimizers(self) -> Any:
        batches = len(self.train_dataloader())
        self.told["batches"] = batches
        return self.by_steps(one_cycle, batches * self.trainer.max_epochs)


class Statistics(Asks):
    """Computes a mean over the rows of the training data before the first step."""

    def configure_optimizers(self) -> Any:
        self.trainer.fit_loop.setup_data()
        total = torch.zeros(2, dtype=torch.float64)
        for inputs, _ in self.trainer.train_dataloader:
            total += torch.tensor([inputs.double().sum(), len(inputs)])
        whole = self.trainer.strategy.reduce(total, reduce_op="sum")
        self.told["mean"] = float(whole[0] / whole[1])
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Collectives(Asks):
    """Uses each collective operation of its trainer in each hook before training, and in later
    ones.
    """

    def ask(self, hook: str) -> None:
        strategy = self.trainer.strategy
        ones = torch.ones(2, dtype=torch.float64)
        strategy.barrier(hook)
        self.told[hook] = (
            strategy.reduce(ones, reduce_op="mean").tolist(),
            strategy.broadcast(hook if self.trainer.is_global_zero else "", src=0),
            float(self.all_gather(ones).mean()),
            strategy.reduce_boolean_decision(True),
            strategy.reduce(torch.tensor(3), reduce_op="max").item(),
            self.trainer.max_steps,
            self.trainer.limit_train_batches,
        )

    def setup(self, stage: str) -> None:
        self.ask("setup")

    def configure_model(self) -> None:
        self.ask("configure_model")

    def configure_callbacks(self) -> Any:
        self.told["world"] = self.trainer.world_size == self.trainer.strategy.world_size
        return [pl.callbacks.ModelSummary(max_depth=2), pl.callbacks.LearningRateMonitor("step")]

    def configure_optimizers(self) -> Any:
        self.ask("configure_optimizers")
        return self.by_steps(one_cycle, int(self.trainer.estimated_stepping_batches))

    def on_fit_start(self) -> None:
        self.ask("on_fit_start")

    def on_train_start(self) -> None:
        self.ask("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.ask("on_train_epoch_start")

    def on_fit_end(self) -> None:
        self.ask("on_fit_end")


class Tuned(Asks):
    """A module whose learning rate a tuner finds first."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class TwoTasks(Asks):
    """Weights two tasks by variances in a plain tensor, which its optimizer trains too."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def loss(self, batch: Any) -> torch.Tensor:
        made = self.layers(batch[0])
        parts = torch.stack([(made - batch[1]).square().mean(), made.abs().mean()])
        return (torch.exp(-self.log_var) * parts).sum() + self.log_var.sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.parameters(), self.log_var], 1e-2)

    def on_fit_end(self) -> None:
        self.told["variances"] = self.log_var.tolist()


class TwoTasksByHand(TwoTasks):
    """The model of TwoTasks with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


EARLY: dict[str, tuple[type[Asks], dict[str, Any]]] = {
    "one cycle": (OneCycle, {}),
    "one cycle, accumulated": (OneCycle, {"accumulate_grad_batches": 2}),
    "one cycle, limited": (OneCycle, {"limit_train_batches": 3}),
    "one cycle, by steps": (OneCycle, {"max_steps": 5}),
    "warm-up": (WarmUp, {}),
    "in setup": (InSetup, {}),
    "in configure_model": (InConfigureModel, {}),
    "its own loader": (OwnLoader, {}),
    "statistics of the data": (Statistics, {}),
    "collectives": (Collectives, {"logger": True}),
    "tensors of its own": (TwoTasks, {"accumulate_grad_batches": 2}),
}
AT_ONCE: dict[str, tuple[type[Asks], dict[str, Any]]] = {
    "tensors of its own by hand": (TwoTasksByHand, {}),
}
TUNED = ("the tuner", "the callback")


def run(name: str, split: Any, folder: str) -> dict[str, Any]:
    """Train one program, with a split's strategy or with Lightning alone in one process."""
    kind, options = {**EARLY, **AT_ONCE}.get(name, (Tuned, {}))
    finder = [pl.callbacks.LearningRateFinder(1e-3, 1.0, 12)] if name == "the callback" else []
    given: dict[str, Any] = {"devices": 1, "callbacks": finder, **options}
    if split is not None:
        given |= {"devices": split.world, "strategy": split.strategy()}
    if given.pop("logger", False):
        given["logger"] = pl.loggers.CSVLogger(folder)
    trainer, module = make_trainer(Program(), folder, **given), kind()

    def make() -> Any:
        if split is not None:
            return split.loader(points(ROWS), seed=SEED)
        return DataLoader(points(ROWS), batch_sampler=Epochs(ROWS, shuffle=True))

    if name == "the tuner":
        found = Tuner(trainer).lr_find(module, make(), min_lr=1e-3, max_lr=1.0, num_training=12)
        module.told["losses"] = found.results["loss"]
    if kind is OwnLoader:
        module.train_dataloader = make
        trainer.fit(module)
    else:
        trainer.fit(module, make())
    if finder:
        module.told["losses"] = finder[0].optimal_lr.results["loss"]
    return {**describe(module, trainer), "told": module.told}


def run_or_return_error(name: str, split: Any, folder: str) -> Any:
    """Return the result of a program, or the error message that it was refused with."""
    try:
        return run(name, split, folder)
    except EvenerError as error:
        return str(error)


def train_all(folder: Path, rank: int, shares: list[int], micros: list[int]) -> None:
    """Train every program as one rank."""
    torch.set_num_threads(1)
    audit_first_step()
    plan = make_plan(shares, micros)
    found = {
        name: run_or_return_error(name, Split(plan), str(folder))
        for name in (*EARLY, *AT_ONCE, *TUNED)
    }
    torch.save(found, folder / f"{rank}.pt")


def reference_all(folder: Path, rank: int) -> None:
    """Train every program in one process."""
    torch.set_num_threads(1)
    found = {name: run(name, None, str(folder)) for name in (*EARLY, *AT_ONCE, *TUNED)}
    torch.save(found, folder / f"{rank}.pt")
