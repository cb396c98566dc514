"""Lightning programs with various options, losses and logged metrics.

One process and several ranks must train them alike. tests/support/rank_server.py runs the functions
that take a folder and a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
import torch
import torchmetrics
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from evener.errors import EvenerError
from evener.torch import Split
from tests.support.huggingface_programs import SEED, WORDS, Texts, make_plan, pad_texts
from tests.support.lightning_programs import Epochs, Module, Program, describe, make_trainer, points

Where = Callable[..., Any]  # makes the training's loader from a data set


class Case(msgspec.Struct, frozen=True):
    """One training; `options` are passed to the trainer."""

    options: dict[str, Any] = {}
    module: str = "plain"
    rows: int = 17
    by: str = "fit"  # where the loader is given: to fit, by a data module or by the module
    validate: bool = False
    check: bool = True
    count: bool = False
    schedule: dict[int, int] = {}  # batches to accumulate, by epoch
    at_once: bool = False  # only for plans in which each share is one pass


CASES = {
    "limited": Case({"limit_train_batches": 3}, rows=29),
    "limited to a part": Case({"limit_train_batches": 0.5}, rows=29),
    "overfitted": Case({"overfit_batches": 2}, validate=True),
    "a fast run": Case({"fast_dev_run": 3}),
    "accumulated more later": Case(schedule={0: 1, 1: 2}),
    "by a data module": Case(by="data module"),
    "by train_dataloader": Case(by="module"),
    "figures": Case(module="figures"),
    "tokens": Case({"gradient_clip_val": 0.5}, "tokens", count=True),
    "LBFGS": Case(module="lbfgs", at_once=True),
    "split.loss": Case(module="split.loss", at_once=True),
    "rows of all ranks": Case(module="gathered", at_once=True),
}


class Figures(Module):
    """Logs metrics that depend on rows, in each way that Lightning offers."""

    def __init__(self) -> None:
        super().__init__(manual=False)
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.ends = 0
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch_idx)
        predicted, rows = self.layers(batch[0]), len(batch[0])
        loss = mse_loss(predicted, batch[1])
        self.mean.update(predicted.detach().squeeze(1))
        self.log("metric", self.mean, on_epoch=True, on_step=False)
        self.log("loss", loss, on_epoch=True, on_step=True, sync_dist=True)
        self.log("given", loss, on_epoch=True, on_step=False, batch_size=rows, sync_dist=True)
        self.log("rows", float(rows), on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
        self.log(
            "most", predicted.max(), on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True
        )
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends += 1


class Tokens(pl.LightningModule):
    """Logs the mean loss over labels other than -100, of padded rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, 6)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, WORDS)
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.layers(self.words(batch["input_ids"]))
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.log("loss", loss, on_epoch=True, on_step=True, sync_dist=True)
        return loss

    configure_optimizers = Module.configure_optimizers


class InParts(Module):
    """Loops over the passes of a batch itself."""

    def __init__(self, split: Any) -> None:
        super().__init__(manual=False)
        self.split = split

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for part in self.split.parts(batch):
            part.backward(mse_loss(self.layers(part.batch[0]), part.batch[1]))
        return self.layers(batch[0]).mean()


class Weighted(Module):
    """A mean loss with class weights, or a sum."""

    def __init__(self, summed: bool) -> None:
        super().__init__(manual=False)
        self.summed = summed

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        predicted, targets = self.layers(batch[0]), batch[1]
        if self.summed:
            return mse_loss(predicted, targets, reduction="sum")
        logits = torch.cat([predicted, -predicted], 1)
        return cross_entropy(
            logits, (targets[:, 0] > 0).long(), weight=logits.new_tensor([1.0, 5.0])
        )


class Lbfgs(Module):
    """Trains with L-BFGS and a line search, for several iterations per batch."""

    def __init__(self) -> None:
        super().__init__(manual=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), 0.5, max_iter=3, line_search_fn="strong_wolfe")


class WithSplit(Module):
    """Losses that need the split: of all ranks' rows if `gathered`, otherwise of weighted rows."""

    def __init__(self, split: Any, gathered: bool) -> None:
        super().__init__(manual=False)
        self.split, self.gathered = split, gathered

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        predicted, targets = self.layers(batch[0]), batch[1]
        if self.gathered:
            every = self.split.gather(predicted) if self.split else predicted
            return ((every - every.T) ** 2 + 1).log().mean() + (every.mean() - 1) ** 2
        weights = targets.abs() + 1
        total = (weights * (predicted - targets) ** 2).sum()
        return self.split.loss(total, weights.sum()) if self.split else total / weights.sum()


REFUSED = {
    "a sum": Case(module="sum"),
    "class weights": Case(module="classes"),
    "tokens that nothing counts": Case(module="tokens"),
    "rows that are counted as tokens": Case(count=True),
    "parts": Case(module="parts"),
    "unchecked": Case({"fast_dev_run": 1}, module="sum", check=False),
}


def make_module(case: Case, split: Any) -> Any:
    """Return the module of a case, for a split or (None) for one process."""
    if case.module in ("split.loss", "gathered"):
        return WithSplit(split, case.module == "gathered")
    if case.module == "parts":
        return InParts(split)
    if case.module in ("sum", "classes"):
        return Weighted(case.module == "sum")
    return {"plain": lambda: Module(False), "figures": Figures, "tokens": Tokens, "lbfgs": Lbfgs}[
        case.module
    ]()


def fit(case: Case, make: Where, held_out: Any, trainer: pl.Trainer, module: Any) -> None:
    """Train, with the loader given in the case's way."""
    data: Any = Texts(case.rows) if case.module == "tokens" else points(case.rows)
    options = {"collate_fn": pad_texts} if case.module == "tokens" else {}
    if case.by == "data module":

        class Data(pl.LightningDataModule):
            def train_dataloader(self) -> Any:
                return make(data, **options)

        trainer.fit(module, datamodule=Data())
    elif case.by == "module":
        module.train_dataloader = lambda: make(data, **options)
        trainer.fit(module)
    else:
        trainer.fit(module, make(data, **options), held_out)


def count_labels(part: Any) -> Any:
    return (
        (part.batch["labels"] != -100).sum()
        if isinstance(part.batch, dict)
        else part.batch[1].abs().sum()
    )


def run(case: Case, split: Any, folder: str) -> dict[str, Any]:
    """Train a case with a split's strategy, or with Lightning alone in one process."""
    callbacks = [pl.callbacks.GradientAccumulationScheduler(case.schedule)] if case.schedule else []
    given: dict[str, Any] = {"callbacks": callbacks, "devices": 1}
    if split is not None:
        weighed = {"count": count_labels} if case.count else {}
        given |= {"devices": split.world, "strategy": split.strategy(**weighed, check=case.check)}
    trainer = make_trainer(Program(options=case.options), folder, **given)
    module = make_module(case, split)

    def make(data: Any, **options: Any) -> Any:
        if split is not None:
            return split.loader(data, seed=SEED, **options)
        order = Epochs(case.rows, shuffle="overfit_batches" not in case.options)
        return DataLoader(data, batch_sampler=order, **options)

    held_out: Any = None
    # in several passes, the validation batches would have other rows
    if case.validate and (split is None or split.shares == split.micros):
        own = DataLoader(points(21), batch_size=8)
        held_out = split.loader(points(21), shuffle=False, training=False) if split else own
    fit(case, make, held_out, trainer, module)
    shown = {name: float(value) for name, value in trainer.logged_metrics.items()}
    return {
        **describe(module, trainer),
        "shown": shown,
        "ends": getattr(module, "ends", 0),
        "seen": getattr(module, "seen", []),
    }


def sentence(called: Callable[[], Any]) -> str:
    """Return the error message that a call ends with."""
    try:
        called()
    except EvenerError as error:
        return str(error)
    return "learned"


def train_all(folder: Path, rank: int, shares: list[int], micros: list[int]) -> None:
    """Train every case as one rank, and collect the refusals of others."""
    torch.set_num_threads(1)
    plan, here = make_plan(shares, micros), str(folder)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        called = partial(run, case, Split(plan), here)
        found[name] = sentence(called) if case.at_once and shares != micros else called()
    found |= {
        name: sentence(partial(run, case, Split(plan), here)) for name, case in REFUSED.items()
    }
    found["another loader"] = sentence(lambda: fit_another(Split(plan), here))
    found["another strategy"] = sentence(lambda: fit_by_ddp(Split(plan), here))
    torch.save(found, folder / f"{rank}.pt")


def fit_another(split: Any, folder: str) -> None:
    """Train with the user's own DataLoader after split.loader was called."""
    trainer = make_trainer(
        Program(), folder, strategy=split.strategy(), devices=split.world, max_epochs=1
    )
    split.loader(points(45))
    trainer.fit(Module(False), DataLoader(points(45), batch_size=4))


def fit_by_ddp(split: Any, folder: str) -> None:
    """Train with Lightning's own strategy after split.strategy was called."""
    split.strategy()
    trainer = make_trainer(Program(), folder, strategy="ddp", devices=split.world, max_epochs=1)
    trainer.fit(Module(False), split.loader(points(45)))


def reference_all(folder: Path, rank: int) -> None:
    """Train every case in one process."""
    torch.set_num_threads(1)
    torch.save(
        {name: run(case, None, str(folder)) for name, case in CASES.items()}, folder / f"{rank}.pt"
    )
