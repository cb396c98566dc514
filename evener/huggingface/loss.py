"""What a Trainer's loss is: a mean over rows, labels or items.

`meaning.py` determines it before the first step, and `passes.py` weights passes accordingly.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ..system.replaced import replaced

IGNORED = -100
ITEMS, ROWS = "num_items_in_batch", "rows"


class TrainerLoss(msgspec.Struct, frozen=True):
    """The unit that a trainer's loss averages over: rows, labels or items.

    - `mean_over`: "num_items_in_batch" (the trainer passes this divisor to its loss), "rows",
      "labels" or "shifted labels" (see `count_labels`).
    - `multiplied`: the factor by which the trainer multiplies the loss when several processes
      train.
    - `certain`: True if the checked rows distinguish a mean over rows from a mean over labels.
    """

    mean_over: str
    multiplied: int = 1
    certain: bool = True

    @property
    def excess(self) -> int:
        """The factor by which the trainer's own loss is too large.

        It is the number of processes if the trainer multiplies a mean by it; otherwise, 1.
        """
        return 1 if self.mean_over == ITEMS else self.multiplied

    def count(self, batch: Any) -> float:
        """Return the number of labels in `batch` over which the loss is averaged.

        Return 0 if the loss isn't a mean over labels.
        """
        return count_labels(batch).get(self.mean_over, 0.0)

    def part_of(self, whole: Any, rows: int, piece: Any, own: int) -> float:
        """Return the weight of a piece's loss in its pass's loss.

        - `whole`, `rows`: the batch of the pass, and its number of rows.
        - `piece`, `own`: the rows computed separately because memory ran out, and their number.
        """
        # a sum over items has been divided by the items of all passes
        if own == rows or self.mean_over == ITEMS:
            return 1.0
        return (
            own / rows if self.mean_over == ROWS else self.count(piece) / (self.count(whole) or 1.0)
        )


def silent(trainer: Any) -> Any:
    """Stop a trainer from logging within a `with` block."""
    return replaced(trainer, "log", lambda *_, **__: None)


def assume_loss(trainer: Any, world: int) -> TrainerLoss:
    """Return what the loss averages over according to transformers, unchecked.

    `world` is the number of processes.
    """
    scaled = is_scaled(trainer)
    return TrainerLoss(ITEMS if scaled else ROWS, world if scaled else 1)


def is_scaled(trainer: Any, items: Any = 0) -> bool:
    """True if the trainer expects a sum divided by num_items_in_batch.

    The trainer then doesn't divide the loss by the number of passes in the optimizer step. `items`
    is num_items_in_batch of that step; None if the trainer couldn't count the items.
    """
    own = getattr(trainer, "loss_is_scaled_for_ga", None)
    takes = (
        trainer.model_accepts_loss_kwargs and items is not None
    ) or trainer.compute_loss_func is not None
    return bool(takes) if own is None else bool(own)


def count_labels(batch: Any) -> dict[str, float]:
    """Return the numbers of labels in a batch, without ignored labels.

    - "labels": all of these labels.
    - "shifted labels": all but each row's first label, for models that shift labels by one. This
      key is missing if the labels are already shifted.

    A batch without integer labels has neither key.
    """
    labels, shifted = _labels(batch)
    if labels is None:
        return {}
    counts = {"labels": float((labels != IGNORED).sum())}
    if labels.ndim > 1 and not shifted:
        counts["shifted labels"] = float((labels[..., 1:] != IGNORED).sum())
    return counts


def has_ignored(batch: Any) -> bool:
    """True if the batch has ignored labels (-100)."""
    # Ignored labels show that the loss supports them.
    labels, _ = _labels(batch)
    return labels is not None and bool((labels == IGNORED).any())


def has_uneven_labels(batch: Any) -> bool:
    """True if rows of the batch have different numbers of labels that aren't ignored."""
    labels, _ = _labels(batch)
    if labels is None:
        return False
    counts = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    return len(set(counts.tolist())) > 1


def _labels(batch: Any) -> tuple[Any, bool]:
    """Return a batch's integer labels, and whether they're already shifted."""
    shifted = hasattr(batch, "get") and "shift_labels" in batch
    labels = batch.get("shift_labels" if shifted else "labels") if hasattr(batch, "get") else None
    found = isinstance(labels, torch.Tensor) and labels.ndim and not labels.is_floating_point()
    # None if there are none
    return (labels if found else None), shifted
