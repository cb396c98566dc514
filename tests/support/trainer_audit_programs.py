"""Trainings with transformers and Lightning whose loss looks like a mean in the first batch only.

Exact ones are trained too, with audits and without. See tests/evener/test_trainer_audits.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.data import random_split
from transformers import Trainer, TrainerCallback

from evener.errors import EvenerError
from evener.huggingface import with_plan
from evener.torch import Split
from evener.torch.training_audits import TrainingAudits
from tests.support.huggingface_programs import Program, make_arguments, make_parts, make_plan
from tests.support.lightning_programs import Program as LightningProgram
from tests.support.lightning_programs import make_trainer, points

ROWS = 48  # six batches
PLAIN = Program("plain", ROWS, {"learning_rate": 1e-2, "num_train_epochs": 3})


def train_and_tell(train: Callable[[], Any], weights: Callable[[], Any]) -> dict[str, Any]:
    """Return a training's warnings, its error message, its audited steps and its weights."""
    said, audited = "", []
    decide = TrainingAudits._share_result

    def note_step(audits: Any, *given: Any, **options: Any) -> None:
        audited.append(audits.judge.step)
        decide(audits, *given, **options)

    noting = patch.object(TrainingAudits, "_share_result", note_step)
    with noting, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train()
        except EvenerError as error:
            said = str(error)
    warned = [str(each.message) for each in caught if each.category is UserWarning]
    kept = [each.clone() for each in weights()]
    return {"said": said, "warned": warned, "audited": audited, "weights": kept}


# ---------------------------------------------------------------------- transformers


class Robust(Trainer):
    """Trains a mean over rows with dropout, and keeps and logs its losses."""

    dropout = 0.2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: list[float] = []
        self.calls = 0
        self.baseline = 0.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        targets = inputs["y"]
        predicted = F.dropout(model(**inputs)["predicted"], self.dropout, model.training)
        loss = self.judge(predicted, targets)
        self.calls += 1
        self.kept.append(float(loss.detach()))
        self.log({"own": self.kept[-1]})
        return (loss, predicted) if return_outputs else loss

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(predicted, targets)


class LateMoments(Robust):
    """From the fourth step on, the loss depends on the batch's mean."""

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().judge(predicted, targets)
        if self.state.global_step >= 3:
            loss = loss + (predicted.mean() - targets.mean()) ** 2
        return loss


class OwnBaseline(Robust):
    """Subtracts a moving mean of the batches' targets."""

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = ((targets - self.baseline) * predicted).mean() + predicted.square().mean()
        self.baseline = 0.5 * self.baseline + 0.5 * targets.mean().item()
        return loss


def draw_mask(values: torch.Tensor) -> torch.Tensor:
    """Return 1 for about half of the values, and 0 for the others."""
    return (torch.rand(values.shape) < 0.5).to(values.dtype)


class RandomCount(Robust):
    """A mean over the values that a random mask leaves."""

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = draw_mask(predicted)
        return (mask * (predicted - targets) ** 2).sum() / mask.sum().clamp(min=1)


class ExpectedCount(Robust):
    """A mean over the number of values that a random mask leaves on average."""

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (draw_mask(predicted) * (predicted - targets) ** 2).mean() / 0.5


class Unlike(Robust):
    """Ranks round differently, as on two kinds of devices, and the loss amplifies the
    difference.
    """

    sharpness = 1e8
    terms = torch.linspace(-1.0, 1.3, 32, dtype=torch.float64)

    def judge(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        order = slice(None) if self.args.process_index == 0 else torch.arange(31, -1, -1)
        terms = self.terms[order]
        added = (predicted.reshape(-1, 1) * terms.sin()) @ terms
        waves = torch.sin(self.sharpness * added) / self.sharpness
        return F.huber_loss(predicted.reshape(-1) + waves, targets.reshape(-1))


class Mixing:
    """Collates rows; after a callback has enabled it, it mixes each row with the one before."""

    mixes = False

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        x = torch.stack([row["x"] for row in rows])
        y = torch.stack([row["y"] for row in rows])
        if self.mixes:
            x = 0.5 * x + 0.5 * x.roll(1, 0)
        return {"x": x, "y": y}


class Starts(TrainerCallback):
    """Enables the mixing after the first epoch."""

    def __init__(self, collator: Mixing) -> None:
        self.collator = collator

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.collator.mixes = True


HUGGINGFACE: dict[str, type[Trainer]] = {
    "exact": Robust,
    "late moments": LateMoments,
    "own baseline": OwnBaseline,
    "mixed rows": Robust,
    "unlike ranks": Unlike,
    "random count": RandomCount,
    "expected count": ExpectedCount,
    "rows split on each rank": Robust,
}


def split_rows(rows: Any, rank: int) -> Any:
    """Return a part of the rows that each rank draws for itself."""
    drawn = torch.Generator().manual_seed(rank)
    return random_split(rows, [len(rows) - 8, 8], generator=drawn)[0]


def train_huggingface(folder: Path, rank: int) -> None:
    """Train each program with a plan, and the exact one without audits too."""
    found = {}
    for name in [*HUGGINGFACE, "unaudited"]:
        kind = HUGGINGFACE.get(name, Robust)
        checks = name != "unaudited"
        parts = make_parts(PLAIN)
        options: dict[str, Any] = {}
        if name == "mixed rows":
            options = {"data_collator": (mixing := Mixing()), "callbacks": [Starts(mixing)]}
        if name == "rows split on each rank":
            parts["train_dataset"] = split_rows(parts["train_dataset"], rank)
        planned = with_plan(kind, make_plan((6, 2)), check=checks)
        trainer = planned(args=make_arguments(PLAIN, str(folder)), **options, **parts)
        found[name] = train_and_tell(trainer.train, parts["model"].parameters)
        found[name]["calls"] = trainer.calls
        found[name]["own"] = sum("own" in each for each in trainer.state.log_history)
    torch.save(found, folder / f"{rank}.pt")


# ---------------------------------------------------------------------- Lightning


class Late(pl.LightningModule):
    """A mean over rows with dropout; after the first epoch, the batch's deviation is added."""

    late = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.3)).double()
        self.head = torch.nn.Linear(7, 1).double()
        self.kept: list[float] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self.head(self.layers(batch[0]))
        loss = F.smooth_l1_loss(predicted, batch[1])
        if self.late and self.current_epoch:
            loss = loss + predicted.std()
        self.calls += 1
        self.kept.append(float(loss.detach()))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Always(Late):
    late = False


class MaskedModule(Always):
    """A mean over the values that a random mask leaves, or over their expected number."""

    by_expected_count = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self.head(self.layers(batch[0]))
        mask = draw_mask(predicted)
        errors = mask * (predicted - batch[1]) ** 2
        self.calls += 1
        if self.by_expected_count:
            return errors.mean() / 0.5
        return errors.sum() / mask.sum().clamp(min=1)


class ExpectedModule(MaskedModule):
    by_expected_count = True


class ManuallyMaskedModule(MaskedModule):
    """The same loss, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Adversaries(pl.LightningModule):
    """A generator, a critic with clamped weights, and a schedule, with manual optimization."""

    relative = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.maker = torch.nn.Linear(5, 1).double()
        self.critic = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh()).double()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        own, critics = self.optimizers()
        real, made = batch[1], self.maker(batch[0])
        scores, others = self.critic(real), self.critic(made.detach())
        base = others.mean() if self.relative else 0.0
        critics.zero_grad()
        self.manual_backward(F.softplus(base - scores).mean() + F.softplus(others).mean())
        critics.step()
        with torch.no_grad():
            for each in self.critic.parameters():
                each.clamp_(-0.3, 0.3).mul_(0.99)
        self.toggle_optimizer(own)
        own.zero_grad()
        self.manual_backward(F.softplus(-self.critic(made)).mean())
        own.step()
        self.untoggle_optimizer(own)
        self.lr_schedulers().step()
        self.calls += 1

    def configure_optimizers(self) -> Any:
        own = torch.optim.Adam(self.maker.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
        return [own, torch.optim.Adam(self.critic.parameters(), 1e-2)], [schedule]


class Relative(Adversaries):
    relative = True


LIGHTNING: dict[str, type[Any]] = {
    "exact": Always,
    "late deviation": Late,
    "exact, manual": Adversaries,
    "relative, manual": Relative,
    "rows split on each rank": Always,
    "random count": MaskedModule,
    "random count, manual": ManuallyMaskedModule,
    "expected count": ExpectedModule,
}


def train_lightning(folder: Path, rank: int) -> None:
    """Train each program with a plan, and the exact ones without audits too."""
    found = {}
    plain = {f"{name}, unaudited": LIGHTNING[name] for name in ("exact", "exact, manual")}
    for name, kind in {**LIGHTNING, **plain}.items():
        split = Split(make_plan((6, 2)))
        module = kind()
        strategy = split.strategy(check=name not in plain)
        trainer = make_trainer(
            LightningProgram(), str(folder), devices=split.world, strategy=strategy, max_epochs=3
        )
        rows = points(ROWS)
        if name == "rows split on each rank":
            rows = split_rows(rows, rank)
        loader = split.loader(rows, shuffle=False)
        found[name] = train_and_tell(partial(trainer.fit, module, loader), module.parameters)
        found[name]["calls"] = module.calls
        rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
        found[name]["rates"] = rates
        found[name]["steps"] = trainer.global_step
    torch.save(found, folder / f"{rank}.pt")
