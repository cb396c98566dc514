"""Train Lightning's demo model, as in its template for bug reports.

One of the programs of benchmarks.installed_programs.
"""

import sys

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader


class Model(BoringModel):
    """The demo model with the requested optimizer."""

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        """Return the optimizer."""
        kind, rate = sys.argv[1:]
        return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind](
            self.parameters(), lr=float(rate)
        )


if __name__ == "__main__":
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        max_epochs=4,
        devices=2,
        accelerator="cpu",
        strategy="ddp",
        limit_val_batches=0,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(RandomDataset(32, 64), batch_size=4, shuffle=True))
