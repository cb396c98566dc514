"""Functions that benchmarks.transformers_classes runs in processes.

They train one class after the other, without a plan or by one. tests/support/rank_server.py forks
the ranks from a process that has imported all classes. Each class gives a JSON line; a class that
hangs ends its ranks, and the others continue in new ones.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # optimizers import it in their first step
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer

from benchmarks.chunks import append_result
from evener.errors import EvenerError
from evener.huggingface import with_plan
from tests.support.huggingface_programs import make_plan
from tests.support.matrix_trainings import Ended, compare, make_arguments, note_changes
from tests.support.tiny_models import NotTinyError, classes_with_loss, find_recipe, make_model
from tests.support.tiny_rows import Recipe, Rows, collate

ROWS = 13  # a full batch and a tail of five
SHARES, MICROS = (6, 2), (2, 2)  # the first rank computes three passes, the second one
EXACT = 1e-9
LOGGED = ("loss", "grad_norm", "learning_rate", "epoch")

transformers.logging.set_verbosity_error()
NAMES = tuple(classes_with_loss())  # imports all classes before processes are forked


class Narrow(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Records whether anything was computed in float32 from float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(made, torch.Tensor) and isinstance(first, torch.Tensor):
            self.seen |= made.dtype == torch.float32 and first.dtype == torch.float64
        return made


def train(name: str, recipe: Recipe, kind: Any, folder: str, collator: Any = collate) -> Ended:
    """Train for two steps of SGD."""
    model = make_model(name, recipe.dtype)
    changes = note_changes(model)
    parts = {"train_dataset": Rows(model, recipe, ROWS), "data_collator": collator}
    trainer = kind(model=model, args=make_arguments(folder, lr_scheduler_type="constant"), **parts)
    trainer.train()
    trainer.accelerator.free_memory()
    found = [
        {key: entry[key] for key in LOGGED}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return Ended(changes(), found)


def list_classes(folder: Path, _: int) -> None:
    """Write the names of all classes."""
    (folder / "names.json").write_text(json.dumps(NAMES))


def reference_all(folder: Path, _: int, names: Sequence[str], recipes: dict[str, Any]) -> None:
    """Train without a plan in this process, with the given recipes or new ones."""
    torch.set_num_threads(1)
    for name in names:
        given = recipes.get(name)
        append_result(
            folder / "reference_all0.jsonl", name, partial(reference, folder, name, given)
        )


def reference(folder: Path, name: str, given: Any) -> dict[str, Any]:
    """Train a class without a plan; return its recipe, or why it can't be trained."""
    try:
        recipe = msgspec.convert(given, Recipe) if given else find_recipe(name)
    except NotTinyError as error:
        return {"not_tiny": str(error)}
    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(1)
        ended = train(name, recipe, Trainer, path)
    torch.save(msgspec.structs.asdict(ended), folder / f"{name}.pt")
    return {"recipe": msgspec.to_builtins(recipe), "uneven": is_uneven(make_model(name), recipe)}


def reorder_all(folder: Path, _: int, names: Sequence[str], recipes: dict[str, Any]) -> None:
    """Train without a plan and with the rows of each batch in reverse order; compare."""
    torch.set_num_threads(1)
    for name in names:
        recipe = msgspec.convert(recipes[name], Recipe)
        append_result(folder / "reorder_all0.jsonl", name, partial(reorder, folder, name, recipe))


def reorder(folder: Path, name: str, recipe: Recipe) -> dict[str, Any]:
    """Return the differences from training with the usual order."""
    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(1)
        ended = train(name, recipe, Trainer, path, lambda rows: collate(rows[::-1]))
    return compare(ended, Ended(**torch.load(folder / f"{name}.pt")))


def is_uneven(model: Any, recipe: Recipe) -> bool:
    """True if the recipe's rows have several lengths."""
    rows = Rows(model, recipe, ROWS).rows
    return any(
        len({getattr(row[key], "shape", 0) for row in rows}) > 1
        for key in rows[0]
        if "label" not in key
    )


def plan_all(folder: Path, rank: int, names: Sequence[str], recipes: dict[str, Any]) -> None:
    """Train with a plan, as one rank."""
    torch.set_num_threads(1)
    for name in names:
        recipe = msgspec.convert(recipes[name], Recipe)
        append_result(
            folder / f"plan_all{rank}.jsonl", name, partial(planned, folder, name, recipe)
        )


def planned(folder: Path, name: str, recipe: Recipe) -> dict[str, Any]:
    """Return the differences from training without a plan, or the error that refused the plan."""
    torch.manual_seed(2)
    with tempfile.TemporaryDirectory() as path, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ended = train(name, recipe, with_plan(Trainer, make_plan(SHARES, MICROS)), path)
        except EvenerError as error:
            return {"refused": str(error)}
    warned = sorted({str(each.message)[:200] for each in said if "evener" in each.filename})
    found: dict[str, Any] = {
        **compare(ended, Ended(**torch.load(folder / f"{name}.pt"))),
        "warned": warned,
    }
    if found["weights"] > EXACT:
        model = make_model(name, recipe.dtype).train()
        found |= {"random": is_random(model, recipe), "float32": is_narrow(model, recipe)}
    return found


def is_random(model: Any, recipe: Recipe) -> bool:
    """True if the model draws random numbers, so no two processes compute the same loss."""
    return len({loss_of(model, recipe, seed) for seed in (1, 2, 3)}) > 1


def is_narrow(model: Any, recipe: Recipe) -> bool:
    """True if the model computes in float32 internally."""
    with Narrow() as watch:
        loss_of(model, recipe, 1)
    found: bool = watch.seen
    return found or recipe.dtype == "float32"


def loss_of(model: Any, recipe: Recipe, seed: int) -> float:
    """Return the training loss of a few rows."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return float(model(**collate(Rows(model, recipe, 3).rows))["loss"])
