"""A small convolutional network on pictures of digits made in code: PyTorch's default on CPU slices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from evener.workloads.datasets.digits import digits
from evener.workloads.protocol import Place, Workload
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload

SETTINGS: dict[str, Any] = {"filters": 16, "dense": 64, "learning_rate": 0.001}


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `filters`, `dense`, `learning_rate`."""
    return TorchWorkload(place, partial(recipe, **{**SETTINGS, **settings}), sample_batch)


def recipe(filters: int, dense: int, learning_rate: float) -> Recipe:
    """The network with Adam and cross-entropy."""
    module = model(filters, dense)
    return Recipe(module, torch.optim.Adam(module.parameters(), learning_rate), nn.CrossEntropyLoss())


def model(filters: int = 16, dense: int = 64) -> nn.Sequential:
    """Two convolutions and two dense layers: images (samples, 1, 28, 28) to logits (samples, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, filters, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(filters, 2 * filters, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * filters * 7 * 7, dense),
        nn.ReLU(),
        nn.Linear(dense, 10),
    )


def sample_batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (rows, 1, 28, 28) in 0 to 1 and their digits (rows,)."""
    images, labels = digits(rows, seed)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)
