"""Train a small network in Lightning with a plan; three lines differ from a script for one device.

evener balance --framework torch --workload examples/lightning_train.py:build --export plan.toml
evener launch plan.toml examples/lightning_train.py
"""

from __future__ import annotations

import argparse
import time

import lightning as L  # noqa: N812 - as its documentation writes it
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.torch import Split

ROWS, SIZE, CLASSES = 65_536, 256, 10


class Classifier(L.LightningModule):
    """A classifier with three dense layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Linear(SIZE, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, CLASSES),
        ]
        self.network = nn.Sequential(*layers)

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        """Return the mean loss of a batch."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), 1e-3)


def vectors(rows: int = ROWS) -> TensorDataset:
    """Return noisy vectors with their classes."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, SIZE, generator=generator)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return TensorDataset(centers[labels] + 3 * torch.randn(rows, SIZE, generator=generator), labels)


def build() -> tuple[Classifier, TensorDataset]:
    """Return what `--workload examples/lightning_train.py:build` measures."""
    return Classifier(), vectors()


def main() -> None:
    """Train, and print the rate and the last epoch's loss on the first rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    split = Split()  # 1
    torch.manual_seed(0)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        devices=split.world,
        strategy=split.strategy(),  # 2
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    began = time.monotonic()
    trainer.fit(Classifier(), split.loader(vectors(), seed=0))  # 3
    if trainer.is_global_zero:
        rate = ROWS * options.epochs / (time.monotonic() - began)
        print(
            f"{rate:,.0f} samples/s with the start, loss "
            f"{float(trainer.callback_metrics['loss']):.4f}"
        )


if __name__ == "__main__":
    main()
