"""A Lightning program as a user writes it, which doesn't mention evener."""

import os
import sys
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


class Model(lightning.LightningModule):
    """A small network; with `total`, its loss is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.total = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), False
        self.rows: list[int] = []

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y, reduction="sum" if self.total else "mean")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.rows.append(len(x))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("held out", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer(epochs: int) -> Any:
    """Return a trainer that prints nothing."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "gradient_clip_val": 0.5}
    return lightning.Trainer(max_epochs=epochs, accumulate_grad_batches=2, **options, **quiet)


lightning.seed_everything(1)
data, held_out = (TensorDataset(torch.randn(rows, 6), torch.randn(rows, 1)) for rows in (45, 16))
model, first = Model(), trainer(3)
first.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(held_out, batch_size=4))
learned, rows, model.total = (
    [each.detach().clone() for each in model.parameters()],
    [*model.rows],
    True,
)
last = trainer(1)
last.fit(model, DataLoader(data, batch_size=4, shuffle=True))
weights = {name: value.tolist() for name, value in enumerate(learned)}
logged = {name: float(figure) for name, figure in first.callback_metrics.items()}
after = {name: value.tolist() for name, value in enumerate(model.parameters())}
kept = {
    "weights": weights,
    "rows": rows,
    "logged": logged,
    "after": after,
    "strategy": type(last.strategy).__name__,
}
torch.save(kept, f"{sys.argv[1]}{os.environ['RANK']}.pt")
