"""Trains the cases of tests/support/matrix_parts.py with Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from evener.torch import Split
from tests.support.matrix_parts import Case, compute_loss, count_labels


class Module(pl.LightningModule):
    """Logs its mean loss over the epoch."""

    def __init__(self, case: Case, model: Any) -> None:
        super().__init__()
        self.model, self._case = model, case

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean loss of a batch."""
        loss, _ = compute_loss(self._case, self.model, batch)
        rows = next(len(each) for each in batch.values() if isinstance(each, torch.Tensor))
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=rows)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, as in the other trainers."""
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(
    case: Case, model: Any, split: Split | None, make_loader: Callable[[], Any], folder: str
) -> list[dict[str, float]]:
    """Train the model and return the logged metrics."""
    strategy: dict[str, Any] = {}
    if split is not None:
        count: dict[str, Any] = (
            {"count": lambda part: count_labels(case, part.batch)} if case.by_label else {}
        )
        strategy = {"strategy": split.strategy(**count), "devices": split.world}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=case.window,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **({"devices": 1} | strategy),
    )
    trainer.fit(Module(case, model), make_loader())
    return [{name: float(value) for name, value in trainer.callback_metrics.items()}]
