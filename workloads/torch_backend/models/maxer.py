"""The seed's network: MNIST with far more layers than it needs, to load GPUs of different sizes. It never converges.

Source: jinkos/multi-gpus, gpu_maxing_model.py; 78,923,530 parameters, 2.0 GMAC forward per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from evener.workloads.datasets import grey_noise
from evener.workloads.protocol import Place, Workload
from evener.workloads.torch_backend.classifiers import as_tensors, classifier
from evener.workloads.torch_backend.workload import TorchWorkload

CONVOLUTIONS = (32, 64, 128, 256, "pool", 512, 512, 512, 512, "pool")
DENSE = (2048, 2048, 2048, 2048, 2048, 1024)


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `learning_rate`."""
    learning_rate = settings["learning_rate"]
    return TorchWorkload(place, lambda: classifier(model(), learning_rate), lambda rows: as_tensors(grey_noise(rows)))


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
