"""Programs that a plan trains exactly, so the check of losses must not refuse them.

They are compared with the bare trainer. tests/support/rank_server.py runs the functions that take a
folder and a rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer

from evener.errors import EvenerError
from evener.huggingface import with_plan
from evener.plan.file import Plan
from tests.support.exact_losses import LOSSES, NETS, Loss
from tests.support.fewer_audits import audit_first_step
from tests.support.huggingface_programs import (
    Texts,
    compute_in_float64,
    make_plan,
    pad_texts,
    tiny_llama,
)
from tests.support.matrix_trainings import Ended, compare, make_arguments, note_changes

ROWS = 13  # a full batch and a tail of five


class Points(Dataset[dict[str, Tensor]]):
    """Rows for any of the losses."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(2)
        drawn = [
            torch.randn(ROWS, size, generator=self._random, dtype=torch.float64)
            for size in (6, 2, 6)
        ]
        self._columns = dict(zip(("x", "targets", "other"), drawn, strict=True))
        self._columns["classes"] = torch.randint(0, 3, (ROWS,), generator=self._random)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self._columns.items()}


class Learner(nn.Module):
    """A network with a loss."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self._loss = net.double(), loss

    def forward(
        self, x: Tensor, classes: Tensor, targets: Tensor, other: Tensor
    ) -> dict[str, Tensor]:
        batch = {"x": x, "classes": classes, "targets": targets, "other": other}
        return {"loss": self._loss(self.net, batch)}


class Program(msgspec.Struct, frozen=True):
    """A program; `make` makes the parts of the trainer."""

    make: Callable[[], dict[str, Any]]
    random: bool = False  # it can't be compared
    arguments: dict[str, Any] = {}


def _learner(net: Callable[[], nn.Module], loss: Loss) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": Learner(net(), loss), "train_dataset": Points()}


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _mix_up(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return each row mixed with a part of another row."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    part, order = torch.rand(1, dtype=torch.float64), torch.randperm(len(rows))
    mixed = {
        name: part * batch[name] + (1 - part) * batch[name][order] for name in ("x", "targets")
    }
    return {**batch, **mixed}


def _mask_words(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows with labels at random positions only."""
    batch = pad_texts(rows)
    kept = torch.rand(batch["labels"].shape) < 0.5
    return {**batch, "labels": torch.where(kept, batch["labels"], -100)}


def _texts(
    collate: Any = pad_texts, adapt: Callable[[Any], Any] = lambda model: model
) -> dict[str, Any]:
    model = adapt(compute_in_float64(tiny_llama())).double()
    return {"model": model, "train_dataset": Texts(ROWS), "data_collator": collate}


def _adapt(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    )


PROGRAMS: dict[str, Program] = {
    **{name: Program(_learner(_plain, loss), random) for name, (loss, random) in LOSSES.items()},
    **{
        name: Program(_learner(net, LOSSES["classes"][0]), random)
        for name, (net, random) in NETS.items()
    },
    "mixup": Program(
        lambda: {**_learner(_plain, LOSSES["squares"][0])(), "data_collator": _mix_up}, random=True
    ),
    "a causal model": Program(_texts),
    "clipping": Program(_texts, arguments={"max_grad_norm": 0.1}),
    "gradient checkpointing": Program(_texts, arguments={"gradient_checkpointing": True}),
    "random masking": Program(lambda: _texts(_mask_words), random=True),
    "NEFTune": Program(_texts, random=True, arguments={"neftune_noise_alpha": 5.0}),
    "LoRA": Program(lambda: _texts(adapt=_adapt)),
}


def train(program: Program, plan: Plan | None) -> Ended:
    """Train by the plan, or without one."""
    kind = Trainer if plan is None else with_plan(Trainer, plan)
    torch.manual_seed(0)
    parts = program.make()
    changes = note_changes(parts["model"])
    with tempfile.TemporaryDirectory() as folder:
        kind(args=make_arguments(folder, **program.arguments), **parts).train()
    return Ended(changes())


def reference_all(folder: Path, rank: int) -> None:
    """Train each program in one process."""
    torch.set_num_threads(1)
    bare = {name: train(program, None) for name, program in PROGRAMS.items() if not program.random}
    torch.save(
        {name: msgspec.structs.asdict(each) for name, each in bare.items()}, folder / f"{rank}.pt"
    )


def train_all(folder: Path, rank: int, references: str) -> None:
    """Train each program by a plan as one rank.

    Save the error that refuses it, or how far it is from one process (0 for random ones).
    """
    torch.set_num_threads(1)
    audit_first_step()
    bare, plan, found = torch.load(references), make_plan((6, 2), (2, 2)), dict[str, Any]()
    for name, program in PROGRAMS.items():
        try:
            ended = train(program, plan)
        except EvenerError as error:
            found[name] = str(error)
            continue
        found[name] = 0.0 if program.random else compare(ended, Ended(**bare[name]))["weights"]
    torch.save(found, folder / f"{rank}.pt")
