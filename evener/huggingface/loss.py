"""Describes what a Trainer's loss is a mean over: rows, labels, or items of the whole batch."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ..system.replaced import replaced

IGNORED = -100
ITEMS, ROWS = "num_items_in_batch", "rows"


class TrainerLoss(msgspec.Struct, frozen=True):
    """What a Trainer's loss is a mean over, and the factor that the Trainer multiplies it by.

    `mean_over` is "rows", "num_items_in_batch", "labels" or "shifted labels". `multiplied` is the
    factor: 1 or the number of processes. `certain` is False if several means fit the loss.
    """

    mean_over: str
    multiplied: int = 1
    certain: bool = True

    @property
    def excess(self) -> int:
        """Factor by which the loss under a launcher such as torchrun is larger than the mean.

        It is 1 or the number of processes.
        """
        return 1 if self.mean_over == ITEMS else self.multiplied

    def count(self, batch: Any) -> float:
        """Return the number of labels over which the batch's loss is averaged.

        It is 0 for a loss that isn't a mean over labels.
        """
        return count_labels(batch).get(self.mean_over, 0.0)

    def weigh_piece(self, batch: Any, rows: int, piece: Any, piece_rows: int) -> float:
        """Return the weight of a piece's loss in the loss of its gradient-accumulation pass.

        `batch` is the whole pass, with `rows` rows. `piece` is a part of it, with `piece_rows`
        rows.
        """
        # a sum over items has been divided by the items of all passes
        if piece_rows == rows or self.mean_over == ITEMS:
            return 1.0
        return (
            piece_rows / rows
            if self.mean_over == ROWS
            else self.count(piece) / (self.count(batch) or 1.0)
        )


def silent(trainer: Any) -> Any:
    """Context manager in which the Trainer's `log` does nothing."""
    return replaced(trainer, "log", lambda *_, **__: None)


def assume_loss(trainer: Any, world: int) -> TrainerLoss:
    """Return what the Trainer's settings say about its loss, without checking it.

    `world` is the number of ranks.
    """
    scaled = is_scaled(trainer)
    return TrainerLoss(ITEMS if scaled else ROWS, world if scaled else 1)


def is_scaled(trainer: Any, items: Any = 0) -> bool:
    """Return whether the Trainer assumes that its loss is already divided by `num_items_in_batch`.

    `items` is this number, or None if the Trainer couldn't count the items.
    """
    own = getattr(trainer, "loss_is_scaled_for_ga", None)
    takes = (
        trainer.model_accepts_loss_kwargs and items is not None
    ) or trainer.compute_loss_func is not None
    return bool(takes) if own is None else bool(own)


def count_labels(batch: Any) -> dict[str, float]:
    """Count the labels that aren't ignored, before and after a shift by one position.

    The keys are "labels" and "shifted labels". The second is missing if the labels are shifted
    already or have only one axis. The dict is empty if the batch has no integer labels.
    """
    labels, shifted = _labels(batch)
    if labels is None:
        return {}
    counts = {"labels": float((labels != IGNORED).sum())}
    if labels.ndim > 1 and not shifted:
        counts["shifted labels"] = float((labels[..., 1:] != IGNORED).sum())
    return counts


def has_ignored(batch: Any) -> bool:
    """Return whether any label in the batch is ignored (-100).

    If so, the loss supports ignored labels.
    """
    labels, _ = _labels(batch)
    return labels is not None and bool((labels == IGNORED).any())


def has_uneven_labels(batch: Any) -> bool:
    """Return whether some rows have more labels than others; ignored labels don't count."""
    labels, _ = _labels(batch)
    if labels is None:
        return False
    counts = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    return len(set(counts.tolist())) > 1


def _labels(batch: Any) -> tuple[Any, bool]:
    """Return the batch's labels, or None, and whether they are already shifted by one position."""
    shifted = hasattr(batch, "get") and "shift_labels" in batch
    labels = batch.get("shift_labels" if shifted else "labels") if hasattr(batch, "get") else None
    found = isinstance(labels, torch.Tensor) and labels.ndim and not labels.is_floating_point()
    return (labels if found else None), shifted
