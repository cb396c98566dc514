"""Four recurrent layers and a dense one: a model whose step time is flat up to large batches.

Source: the seed on several GPUs in Keras, 4 x GRU 512 and Dense 128. The sequences are made in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from evener.workloads.datasets import sine_waves
from evener.workloads.protocol import Place, Workload
from evener.workloads.torch_backend.classifiers import as_tensors, classifier
from evener.workloads.torch_backend.workload import TorchWorkload


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
    shape = {key: settings[key] for key in ("features", "units", "layers", "dense", "classes")}
    waves = {key: settings[key] for key in ("steps", "features", "classes")}
    return TorchWorkload(
        place,
        lambda: classifier(GruNet(**shape), settings["learning_rate"]),
        lambda rows: as_tensors(sine_waves(rows, **waves)),
    )
