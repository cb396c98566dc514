"""Train with speechbrain's Brain, as in its template for classification.

Its own data sets pad rows to the longest.
"""

from __future__ import annotations

from typing import Any

import speechbrain
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.distributed import ddp_init_group


class Words(speechbrain.Brain):  # type: ignore[misc]  # speechbrain is not followed
    """A classifier of the mean over a row's frames."""

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        """Return the logits of each row, from the mean over its frames without padding."""
        frames, lengths = batch.frames
        computed = self.modules.encoder(frames.unsqueeze(-1))
        counts = (lengths * frames.shape[1]).round()
        there = torch.arange(frames.shape[1])[None] < counts[:, None]
        pooled = (computed * there.unsqueeze(-1)).sum(1) / counts.unsqueeze(-1)
        return self.modules.head(pooled)  # type: ignore[no-any-return]

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        """Return the mean loss over rows."""
        return torch.nn.functional.cross_entropy(predictions, batch.kind.data.view(-1))


if __name__ == "__main__":
    run: dict[str, Any] = {
        "device": "cpu",
        "distributed_launch": True,
        "distributed_backend": "gloo",
    }
    ddp_init_group(run)
    torch.manual_seed(3)
    drawn = torch.Generator().manual_seed(1)
    rows = {
        str(number): {
            "frames": torch.randn(10 + number % 5, generator=drawn),
            "kind": torch.tensor([number % 3]),
        }
        for number in range(96)
    }
    data = DynamicItemDataset(rows, output_keys=["id", "frames", "kind"])
    modules = {
        "encoder": torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh()),
        "head": torch.nn.Linear(8, 3),
    }
    brain = Words(
        modules, lambda weights: torch.optim.SGD(weights, lr=0.1), hparams={"seed": 3}, run_opts=run
    )
    brain.fit(range(2), data, train_loader_kwargs={"batch_size": 4, "shuffle": True})
