"""Four recurrent layers and a dense one: a model whose step time is flat up to large batches.

Source: the seed on several GPUs in Keras, 4 x GRU 512 and Dense 128. The sequences are made in code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evener.workloads.protocol import Place, Workload
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload

SETTINGS: dict[str, Any] = {
    "steps": 64,
    "features": 32,
    "units": 512,
    "layers": 4,
    "dense": 128,
    "classes": 10,
    "learning_rate": 0.001,
}


class GruNet(nn.Module):  # type: ignore[misc]  # torch is not followed
    """`layers` GRUs of `units`, then a dense layer and logits from the last step's state."""

    def __init__(self, features: int, units: int, layers: int, dense: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(features, units, layers, batch_first=True)
        self.head = nn.Sequential(nn.Linear(units, dense), nn.ReLU(), nn.Linear(dense, classes))

    def forward(self, sequences: Tensor) -> Tensor:
        """Sequences (samples, steps, features) to logits (samples, classes)."""
        states, _ = self.recurrent(sequences)
        logits: Tensor = self.head(states[:, -1])
        return logits


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `steps`, `features`, `units`, `layers`, `dense`, `classes`."""
    chosen = {**SETTINGS, **settings}
    steps = chosen.pop("steps")
    data = partial(sequences, steps=steps, features=chosen["features"], classes=chosen["classes"])
    return TorchWorkload(place, partial(recipe, **chosen), data)


def recipe(learning_rate: float, **shape: int) -> Recipe:
    """The network with Adam and cross-entropy."""
    module = GruNet(**shape)
    return Recipe(module, torch.optim.Adam(module.parameters(), learning_rate), nn.CrossEntropyLoss())


def sequences(rows: int, steps: int = 64, features: int = 32, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Noisy sine waves (rows, steps, features) whose frequency is their class, and the classes (rows,)."""
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    phase = 2 * math.pi * torch.rand((rows, 1, features), generator=generator)
    angle = 2 * math.pi * (labels[:, None, None] + 1) * torch.arange(steps)[None, :, None] / steps
    noise = 0.3 * torch.randn((rows, steps, features), generator=generator)
    return torch.sin(angle + phase) + noise, labels
