"""The seed's network: MNIST with far more layers than it needs, so that GPUs of different sizes sweat. Never converges.

Source: jinkos/multi-gpus, gpu_maxing_model.py; 78,923,530 parameters, 2.0 GMAC forward per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from evener.workloads.protocol import Place, Workload
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload

PARAMETERS = 78_923_530
CONVOLUTIONS = (32, 64, 128, 256, "pool", 512, 512, 512, 512, "pool")
DENSE = (2048, 2048, 2048, 2048, 2048, 1024)
SETTINGS: dict[str, Any] = {"learning_rate": 0.001}


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `learning_rate`."""
    return TorchWorkload(place, partial(recipe, **{**SETTINGS, **settings}), sample_batch)


def recipe(learning_rate: float) -> Recipe:
    """The network with Adam and cross-entropy, as the seed has it."""
    module = model()
    return Recipe(module, torch.optim.Adam(module.parameters(), learning_rate), nn.CrossEntropyLoss())


def model() -> nn.Sequential:
    """Images (samples, 1, 28, 28) to logits (samples, 10)."""
    layers: list[nn.Module] = []
    before = 1
    for filters in CONVOLUTIONS:
        if isinstance(filters, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(before, filters, 3, padding=1), nn.ReLU()]
            before = filters
    layers.append(nn.Flatten())
    before *= 7 * 7
    for units in DENSE:
        layers += [nn.Linear(before, units), nn.ReLU()]
        before = units
    return nn.Sequential(*layers, nn.Linear(before, 10))


def sample_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Grey values 0 to 255 and labels, of the shapes of MNIST; the content is noise."""
    generator = torch.Generator().manual_seed(rows)
    images = torch.randint(0, 256, (rows, 1, 28, 28), generator=generator, dtype=torch.uint8).float()
    return images, torch.randint(0, 10, (rows,), generator=generator)
