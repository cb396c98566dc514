"""Train with fastai's Learner in its distributed context, as in its tutorial."""

from __future__ import annotations

import torch
from fastai.basics import SGD, DataLoaders, Learner
from fastai.data.load import DataLoader
from fastai.distributed import distrib_ctx  # noqa: F401 - becomes a method of Learner

if __name__ == "__main__":
    torch.manual_seed(3)
    drawn = torch.Generator().manual_seed(1)
    rows = [
        (torch.randn(6, generator=drawn), torch.randint(0, 3, (), generator=drawn))
        for _ in range(96)
    ]
    loaders = DataLoaders(
        DataLoader(rows, bs=4, shuffle=False, num_workers=0),
        DataLoader(rows[:16], bs=4, num_workers=0),
    )
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    learner = Learner(loaders, model, torch.nn.CrossEntropyLoss(), opt_func=SGD, lr=0.05)
    with learner.distrib_ctx(sync_bn=False):
        learner.fit(2)
