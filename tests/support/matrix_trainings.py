"""Trains the cases of tests/support/matrix_parts.py in one process, and with a plan on two ranks.

tests/support/rank_server.py runs the functions that take a folder and a rank.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from evener.errors import EvenerError
from evener.huggingface import with_plan
from evener.plan.file import Plan
from evener.torch import Split
from tests.support.fewer_audits import audit_first_step
from tests.support.huggingface_programs import GLOBAL_BATCH, make_plan
from tests.support.matrix_parts import (
    LOSSES,
    Case,
    build,
    compute_loss,
    count_labels,
    flatten,
    parse,
)
from tests.support.tiny_rows import Rows

RATE = 0.1
# logged times, which differ between runs
UNLIKE = ("runtime", "per_second", "total_flos", "mean_token_accuracy_time")


class Ended(msgspec.Struct):
    """The result of a training: the change of each weight, and the logged metrics of each step."""

    changes: list[torch.Tensor]
    logged: list[dict[str, float]] = []


def train_case(case: Case, plan: Plan | None, folder: str) -> Ended:
    """Train with the plan, or without one."""
    torch.manual_seed(1 if plan is None else 2)
    return _TRAINERS[case.trainer](case, plan, folder)


def note_changes(model: Any) -> Callable[[], list[torch.Tensor]]:
    """Return a function that returns how much each weight has changed since now."""
    before = [tensor.detach().clone() for tensor in model.parameters()]
    return lambda: [
        after.detach() - start for after, start in zip(model.parameters(), before, strict=True)
    ]


# ---------------------------------------------------------------------- transformers


def make_arguments(folder: str, **changes: Any) -> TrainingArguments:
    """Return arguments for one epoch in order, with each step logged and no gradient clipping."""
    many = {"ddp_backend": "gloo"} if int(os.environ.get("WORLD_SIZE", 1)) > 1 else {}
    options: dict[str, Any] = {
        "use_cpu": True,
        "num_train_epochs": 1,
        "per_device_train_batch_size": GLOBAL_BATCH,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1e30,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(folder, **{**options, **many, **changes})


def _train_transformers(case: Case, plan: Plan | None, folder: str) -> Ended:
    model, rows, collate = build(case)
    kind, options = _choose_trainer(case)
    smoothing = 0.1 if case.loss == "label smoothing" else 0.0
    arguments = make_arguments(
        folder,
        gradient_accumulation_steps=case.window,
        label_smoothing_factor=smoothing,
        include_num_input_tokens_seen="non_padding",
    )
    planned = kind if plan is None else with_plan(kind, plan)
    parts = {
        "train_dataset": rows,
        "eval_dataset": Rows(model, rows.recipe, 5),
        "data_collator": collate,
    }
    trainer = planned(model=model, args=arguments, **parts, **options)
    changes = note_changes(model)
    trainer.train()
    if "labels" in rows[0]:
        trainer.evaluate()
    return Ended(changes(), _figures(trainer))


def _figures(trainer: Any) -> list[dict[str, float]]:
    return [
        {
            name: float(value)
            for name, value in entry.items()
            if not any(word in name for word in UNLIKE)
        }
        for entry in trainer.state.log_history
    ]


def _choose_trainer(case: Case) -> tuple[Any, dict[str, Any]]:
    """Return the Trainer class that computes the case's loss, and its options."""
    if case.loss.startswith("compute_loss_func"):

        def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            return LOSSES[case.loss](*flatten(case, outputs, labels), num_items_in_batch)

        return Trainer, {"compute_loss_func": function}
    if case.loss not in LOSSES:
        return Trainer, {}

    class OwnLoss(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            loss, outputs = compute_loss(case, model, inputs)
            return (loss, outputs) if return_outputs else loss

    return OwnLoss, {}


def _train_trl(case: Case, plan: Plan | None, folder: str) -> Ended:
    from tests.support import trl_programs

    changes = {
        "train_sampling_strategy": "sequential",
        "gradient_accumulation_steps": case.window,
        "optim": "sgd",
    }
    parts = trl_programs.make_parts(
        case.model, folder, **changes, per_device_train_batch_size=GLOBAL_BATCH
    )
    kind = trl_programs.KINDS[case.model][0]
    trainer = (kind if plan is None else with_plan(kind, plan))(**parts)
    changed = note_changes(trainer.model)
    trainer.train()
    return Ended(changed(), _figures(trainer))


# ---------------------------------------------------------------------- hand-written loops


def _batches(case: Case, rows: Any, collate: Any, split: Split | None) -> Any:
    if split is not None:
        return split.loader(rows, shuffle=False, collate_fn=collate)
    return DataLoader(rows, GLOBAL_BATCH, collate_fn=collate)


def _train_loop(case: Case, plan: Plan | None, _: str, accelerator: Any = None) -> Ended:
    """Train in a hand-written loop; gradients of several batches are the mean of each
    batch's mean.
    """
    split = None if plan is None else Split(plan)
    model, rows, collate = build(case)
    changes, optimizer = note_changes(model), torch.optim.SGD(model.parameters(), RATE)
    trained = model
    if accelerator is not None:
        trained, optimizer = accelerator.prepare(model, optimizer)
    trained = trained if split is None else split.wrap(trained)
    backward = torch.Tensor.backward if accelerator is None else accelerator.backward
    loader, steps = _batches(case, rows, collate, split), -(-case.rows // GLOBAL_BATCH)
    for number, batch in enumerate(loader):
        last = (number + 1) % case.window == 0 or number + 1 == steps
        scale = 1 / min(case.window, steps - number // case.window * case.window)
        if split is None:
            backward(compute_loss(case, trained, batch)[0] * scale)
        else:
            _backward_parts(case, split, trained, batch, scale, last)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return Ended(changes())


def _count(case: Case) -> Callable[[Any], Any] | None:
    """Return the argument of `count=`."""
    return (lambda part: count_labels(case, part.batch)) if case.by_label else None


def _backward_parts(
    case: Case, split: Split, model: Any, batch: Any, scale: float, last: bool
) -> None:
    with nullcontext() if last else split.no_sync(model):
        for part in split.parts(batch, count=_count(case)):
            part.backward(compute_loss(case, model, part.batch)[0] * scale)


def _train_accelerate(case: Case, plan: Plan | None, folder: str) -> Ended:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    ended = _train_loop(case, plan, folder, accelerator)
    accelerator.free_memory()
    return ended


def _train_lightning(case: Case, plan: Plan | None, folder: str) -> Ended:
    from tests.support.matrix_lightning import fit

    split = None if plan is None else Split(plan)
    model, rows, collate = build(case)
    changes = note_changes(model)
    logged = fit(case, model, split, lambda: _batches(case, rows, collate, split), folder)
    return Ended(changes(), logged)


_TRAINERS: dict[str, Callable[[Case, Plan | None, str], Ended]] = {
    "transformers": _train_transformers,
    "TRL": _train_trl,
    "PyTorch": _train_loop,
    "accelerate": _train_accelerate,
    "Lightning": _train_lightning,
}


# ---------------------------------------------------------------------- ranks


def plan_for(case: Case) -> Plan:
    """Return a plan with shares 6:2, in three passes and one pass, or in one pass each."""
    return make_plan((6, 2), (2, 2) if case.passes else (6, 2))


def compare(ended: Ended, bare: Ended) -> dict[str, float]:
    """Return the largest relative differences of weights and of each logged metric.

    For weights it is relative to the largest change of any weight.
    """
    largest = max(float(each.abs().max()) for each in bare.changes if each.numel())
    pairs = zip(ended.changes, bare.changes, strict=True)
    apart = max(float((one - other).abs().max()) for one, other in pairs if one.numel())
    found = {"weights": apart / largest if largest else 9.0, "change": largest}
    for mine, its in zip(ended.logged, bare.logged, strict=False):
        for name in its.keys() | mine.keys():
            missing = name not in mine or name not in its
            found[name] = max(found.get(name, 0.0), 9.0 if missing else far(mine[name], its[name]))
    if len(ended.logged) != len(bare.logged):
        found["entries"] = 9.0
    return found


def far(one: float, other: float) -> float:
    """Return the relative difference, or the absolute one for numbers near 0."""
    return abs(one - other) / max(abs(other), 1e-3)


def train_all(folder: Path, rank: int, names: Sequence[str], references: str) -> None:
    """Train cases with a plan as one rank, and save the differences from the reference or the
    refusal.
    """
    torch.set_num_threads(1)
    audit_first_step()
    bare = torch.load(references)
    torch.save({name: train_planned(name, bare[name]) for name in names}, folder / f"{rank}.pt")


def train_planned(name: str, bare: dict[str, Any]) -> dict[str, Any]:
    """Return the differences from the reference, or the error message."""
    case = parse(name)
    with tempfile.TemporaryDirectory() as path:
        try:
            ended = train_case(case, plan_for(case), path)
        except EvenerError as error:
            return {"refused": str(error)}
    return compare(ended, Ended(**bare))


def train_bare(name: str) -> dict[str, Any]:
    """Train in this process without a plan."""
    with tempfile.TemporaryDirectory() as path:
        return msgspec.structs.asdict(train_case(parse(name), None, path))


def reference_all(folder: Path, rank: int, names: Sequence[str]) -> None:
    """Train the cases in one process."""
    torch.set_num_threads(1)
    torch.save({name: train_bare(name) for name in names}, folder / f"{rank}.pt")
