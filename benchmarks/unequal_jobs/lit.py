"""Train a Llama with Lightning's Trainer on rows of tokens under torchrun."""

from __future__ import annotations

import os
from typing import Any

# modules in this folder; imported first, because they limit the GPU
from place import CUDA, SIZES, wait_for_start  # type: ignore[import-not-found]  # isort: skip
import lightning as L  # noqa: N812 - as its documentation writes it
import torch
from llama import Rows, make_model  # type: ignore[import-not-found]
from torch.utils.data import DataLoader


class Module(L.LightningModule):  # type: ignore[misc]
    """The Llama as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean loss over tokens."""
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Train COUNT steps."""
    wait_for_start()
    trainer = L.Trainer(
        accelerator="gpu" if CUDA else "cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=SIZES["COUNT"],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Rows(), batch_size=SIZES["ROWS"], shuffle=True))


if __name__ == "__main__":
    main()
