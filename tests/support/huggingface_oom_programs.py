"""Trainings by transformers' Trainer in which passes run out of memory.

They are compared with the bare trainer in one process without such failures. The failures are
injected in the model's layers, forward and backward, as in torch_oom_programs.py.
"""

from __future__ import annotations

import gc
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from evener.errors import DeviceError
from evener.huggingface import with_plan
from evener.training import passes as pass_limits
from tests.support.fewer_audits import audit_first_step
from tests.support.huggingface_programs import (
    ADAM,
    GLOBAL_BATCH,
    TWICE,
    OwnLoss,
    Program,
    choose_class,
    describe,
    make_arguments,
    make_parts,
    make_plan,
)
from tests.support.last_words import last_words
from tests.support.torch_oom_programs import Bomb, Fuse

PROGRAMS = {
    "tokens": Program(
        rows=29, arguments={**ADAM, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    ),
    "rows": Program("plain", 29, {**ADAM, **TWICE}),
    "rows by a compute_loss, checkpointed": Program(
        "own loss", 21, {**ADAM, **TWICE, "gradient_checkpointing": True}
    ),
}


class Bombs(TrainerCallback):
    """Injects one or two failures in three of four optimizer steps, at any layer of any pass."""

    def __init__(self, model: Any, seed: int) -> None:
        self.fuse, self._numbers = Fuse(), random.Random(seed)
        kinds = (torch.nn.Linear, torch.nn.RMSNorm)
        self._layers = [module for module in model.modules() if isinstance(module, kinds)]
        for number, layer in enumerate(self._layers):
            layer.register_forward_hook(
                lambda *given, number=number: Bomb.apply(given[2], self.fuse, number)
            )
        model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.fuse.begin()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        draw = self._numbers
        self.fuse.passes = -1
        self.fuse.at = [
            (
                draw.choice(("forward", "backward")),
                draw.randrange(len(self._layers)),
                draw.randrange(4),
            )
            for _ in range(draw.choice((0, 1, 1, 2)))
        ]


def counting(kind: Any, gathers: bool) -> Any:
    """Return the class with metrics that its compute_loss and its training_step record."""

    class Counting(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.losses: list[int] = []
            self.figures: list[tuple[float, ...]] = []
            self.steps = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows = inputs["y" if "y" in inputs else "input_ids"].double().sum(1)
            mean = self.accelerator.gather(rows.mean()).mean() if gathers else 0.0
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if torch.is_grad_enabled():
                self.losses.append(self.state.global_step)
                self.log({"noted": 1.0})
            if torch.is_grad_enabled() and gathers:
                each = [
                    self.accelerator.gather(own).sum() for own in (rows.sum(), rows, rows.square())
                ]
                self.figures.append((float(mean), *map(float, each)))
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().training_step(*args, **kwargs)

    return Counting


def train(
    program: Program, shares: list[int], micros: list[int], folder: Path, rank: int
) -> dict[str, Any]:
    """Train as one rank by the adapter, with injected failures."""
    pass_limits.CLEAN_STEPS = 1
    parts = make_parts(program)
    passes = {-(-share // micro) for share, micro in zip(shares, micros, strict=True)}
    kind = with_plan(counting(choose_class(program), len(passes) == 1), make_plan(shares, micros))
    bombs = Bombs(parts["model"], rank)
    trainer = kind(args=make_arguments(program, str(folder)), callbacks=[bombs], **parts)
    return {
        **describe(trainer, trainer.train()),
        "burst": bombs.fuse.burst,
        "rank": rank,
        **list_figures(trainer),
    }


def list_figures(trainer: Any) -> dict[str, Any]:
    """Return the metrics that its own class recorded."""
    noted = sum("noted" in entry for entry in trainer.state.log_history)
    return {
        "counted": trainer.losses,
        "noted": noted,
        "calls": trainer.steps,
        "figures": trainer.figures,
    }


def reference(program: Program) -> dict[str, Any]:
    """Train with the bare trainer in this process."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(program, folder, per_device_train_batch_size=GLOBAL_BATCH)
        trainer = counting(choose_class(program), True)(args=arguments, **make_parts(program))
        return {**describe(trainer, trainer.train()), **list_figures(trainer)}


def train_all(folder: Path, rank: int, shares: list[int], micros: list[int]) -> None:
    """Train every program as one rank."""
    torch.set_num_threads(1)
    # each failed pass collects garbage, which takes half a second with all the imports
    gc.freeze()
    audit_first_step()
    own = folder.parent / "out-of-memory"
    torch.save(
        {name: train(each, shares, micros, own, rank) for name, each in PROGRAMS.items()},
        folder / f"{rank}.pt",
    )


def reference_all(folder: Path, rank: int) -> None:
    """Train every program in one process with enough memory."""
    torch.set_num_threads(1)
    torch.save(
        {name: reference(program) for name, program in PROGRAMS.items()}, folder / f"{rank}.pt"
    )


class SummedLoss(OwnLoss):
    """A loss that is twice as large for two rows as for one."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **options) * len(inputs["input_ids"])


def refuse_sum(folder: Path, rank: int) -> None:
    """Save the error of a training on one device whose passes can't be made smaller."""
    program = Program("own loss", 16, {**ADAM, **TWICE})
    parts = make_parts(program)
    trainer = with_plan(SummedLoss, make_plan([8]))(
        args=make_arguments(program, str(folder)), callbacks=[Bombs(parts["model"], 0)], **parts
    )
    try:
        trainer.train()
    except DeviceError as error:
        torch.save(str(error), folder / f"{rank}.pt")


class MeetingLoss(OwnLoss):
    """Computes the mean of a metric over the ranks with torch.distributed."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        if self.state.global_step:
            dist.all_reduce(loss.detach().clone())
        return loss


def meet(folder: Path, rank: int) -> None:
    """Save the messages of two ranks.

    The second runs out of memory where its loss waits for the other rank.
    """
    torch.set_num_threads(1)
    program = Program("own loss", 24, ADAM)
    parts = make_parts(program)
    bombs = Bombs(parts["model"], 0)

    def lay(*_: Any, **__: Any) -> None:
        bombs.fuse.passes, bombs.fuse.at = -1, [("backward", 1, 0)] if rank else []

    bombs.on_step_begin = lay  # type: ignore[method-assign]
    kind = with_plan(MeetingLoss, make_plan([4, 4]))
    trainer = kind(args=make_arguments(program, str(folder)), callbacks=[bombs], **parts)
    said = "learned"
    try:
        trainer.train()
    except (DeviceError, RuntimeError) as error:
        said = last_words(error)
    torch.save(said, folder / f"{rank}.pt")
