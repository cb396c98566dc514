"""A trainer as a workload: what a function returned is a transformers Trainer, or a LightningModule with its data.

    def build():
        return Trainer(model=..., args=..., train_dataset=...)  # or an SFTTrainer, or your own subclass

    def build():
        return module, dataset  # a LightningModule, and its data set or DataLoader

A probe then computes the trainer's own loss on its own collated batches, clips as it does and steps its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from evener.errors import RequestError

from .batches import Data
from .workload import Recipe


def find_recipe(name: str, result: Any) -> Recipe | None:
    """The recipe in a trainer or a module with its data; None for anything else."""
    if _is_a(result, "transformers.", "Trainer"):
        return _from_trainer(result)
    if _is_a(result, "lightning.", "LightningModule"):
        raise RequestError(f"{name} gives a LightningModule without data.", "Return (module, dataset).")
    if isinstance(result, tuple) and len(result) == 2 and _is_a(result[0], "lightning.", "LightningModule"):
        return _from_lightning(name, *result)
    return None


class LossModule(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """A module that returns its loss of a batch, as the trainer computes it."""

    def __init__(self, module: Any, compute: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._compute = compute

    def forward(self, batch: Any) -> Any:
        """The mean loss, a scalar."""
        return self._compute(batch)


def _from_trainer(trainer: Any) -> Recipe:
    from evener.huggingface.checks import needs_equal_passes
    from evener.huggingface.dealt_rows import find_lengths
    from evener.huggingface.rows import training_rows

    optimizer = trainer.create_optimizer()
    parameters, most = list(trainer.model.parameters()), trainer.args.max_grad_norm

    losses: list[Any] = []  # of the pass before, if there is one

    def check_loss() -> None:
        """Ask for the last loss after a backward pass, as the trainer does: the next pass isn't queued before."""
        if trainer.args.logging_nan_inf_filter and losses:
            torch.isfinite(losses.pop()).item()
        losses.clear()

    def finish(*_: Any) -> None:
        """Wait and clip, as the trainer does between the last backward pass and the optimizer's step."""
        check_loss()
        if most:
            torch.nn.utils.clip_grad_norm_(parameters, most)

    optimizer.register_step_pre_hook(finish)

    def compute(batch: Any) -> Any:
        check_loss()
        with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
        losses.append(loss.detach())
        return loss

    rows, collate, _ = training_rows(trainer, trainer.get_train_dataloader)
    lengths = None if needs_equal_passes(trainer) else find_lengths(trainer)
    workers, pinned = trainer.args.dataloader_num_workers, trainer.args.dataloader_pin_memory
    data = _to_data(rows, collate, workers, pinned, lengths=lengths)
    return Recipe(LossModule(trainer.model, compute), optimizer, None, data)


def _from_lightning(name: str, module: Any, given: Any) -> Recipe:
    def compute(batch: Any) -> Any:
        result = module.training_step(batch, 0)
        return result["loss"] if isinstance(result, Mapping) else result

    if not module.automatic_optimization:
        raise RequestError(
            f"{name} optimizes by hand, so that a probe can't know its step.", "Return (module, optimizer, loss)."
        )
    optimizer = _first_optimizer(module.configure_optimizers())
    if optimizer is None:
        raise RequestError(f"{name}: configure_optimizers gives no optimizer.", "Return one.")
    return Recipe(LossModule(module, compute), optimizer, None, _read_data(given))


def _read_data(given: Any) -> Data:
    """A data set, or that of a DataLoader with what it makes batches by."""
    if isinstance(given, DataLoader):
        return _to_data(given.dataset, given.collate_fn, given.num_workers, given.pin_memory)
    return _to_data(given, default_collate)


def _first_optimizer(given: Any) -> Any:
    """The first in any of the forms that `configure_optimizers` may return; None if there is none."""
    if isinstance(given, Mapping):
        given = given.get("optimizer")
    while isinstance(given, tuple | list):
        given = given[0] if given else None
    return _first_optimizer(given) if isinstance(given, Mapping) else given


def _to_data(rows: Any, collate: Any, workers: int = 0, pinned: bool = False, **more: Any) -> Data:
    """The trainer's data; without workers, it fetches the rows of a step when it begins, while its GPU waits."""
    options = {
        "num_workers": workers,
        "pin_memory": pinned and torch.cuda.is_available(),
        "collate_fn": partial(_collate, collate),
    }
    return Data(rows, {**options, **more, "prefetch": None if workers else 0})


def _collate(collate: Any, rows: list[Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """(the module's arguments, a target for each row, which nothing reads)."""
    return {"batch": collate(rows)}, torch.zeros(len(rows))


def _is_a(value: Any, package: str, name: str) -> bool:
    """True if a value is of the package's class of this name; nothing is imported to find out."""
    kinds = type(value).__mro__
    return any(
        kind.__name__ == name and f"{kind.__module__}.".startswith((package, f"pytorch_{package}")) for kind in kinds
    )
