"""Train with composer's Trainer, as in its first example."""

from __future__ import annotations

from typing import Any

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    dist.initialize_dist("cpu")
    torch.manual_seed(3)
    drawn = torch.Generator().manual_seed(1)
    rows = TensorDataset(
        torch.randn(96, 6, generator=drawn), torch.randint(0, 3, (96,), generator=drawn)
    )
    sampler: Any = dist.get_sampler(rows, shuffle=True)
    module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model = ComposerClassifier(module, num_classes=3)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4, sampler=sampler),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05),
        max_duration="2ep",
        device="cpu",
        progress_bar=False,
        seed=3,
    )
    trainer.fit()
