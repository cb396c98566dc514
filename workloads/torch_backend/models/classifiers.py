"""The plain classifiers among the PyTorch models, torch_maxer, torch_mnist and torch_gru, and what all models share.

All data are made in code. Sources are in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.errors import RequestError

from ...datasets import digits, grey_noise, sine_waves
from ...protocol import Place, Workload
from ..workload import Lay, Recipe, TorchWorkload

CONVOLUTIONS = (32, 64, 128, 256, "pool", 512, 512, 512, 512, "pool")
GROUPS = 8  # of GroupNorm
DENSE = (2048, 2048, 2048, 2048, 2048, 1024)


def classifier(module: nn.Module, learning_rate: float) -> Recipe:
    """A module that gives logits, with Adam and cross-entropy."""
    return Recipe(module, torch.optim.Adam(module.parameters(), learning_rate), cross_entropy)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the batch, computed where the logits are."""
    return F.cross_entropy(logits, labels.to(logits.device, non_blocking=True))


def as_tensors(batch: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    """Arrays (x, labels) as tensors; pictures come with their channels last and get them first."""
    x, labels = (torch.from_numpy(array) for array in batch)
    return x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x, labels


def lay_for(place: Place, choices: Mapping[str, Lay]) -> Lay | None:
    """The placement of the model's parts; None for one device. RequestError for an unknown name or too few devices."""
    if place.placement in ("", "single"):
        return None
    if place.placement not in choices:
        *others, last = ("single", *choices)
        raise RequestError(f"There is no placement {place.placement!r}.", f"Choose {', '.join(others)} or {last}.")
    if len(place.devices) < 2:
        raise RequestError(
            f"The placement {place.placement} needs 2 devices; it has {len(place.devices)}.",
            "Name more with --devices.",
        )
    return choices[place.placement]


def conv_blocks(channels: Sequence[int], norm: str) -> list[nn.Module]:
    """Blocks of Conv3x3, normalisation ("group" or "batch"), ReLU and MaxPool2."""
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        normalise = nn.GroupNorm(GROUPS, after) if norm == "group" else nn.BatchNorm2d(after)
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), normalise, nn.ReLU(), nn.MaxPool2d(2)]
    return layers


def build_maxer(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `learning_rate`."""
    learning_rate = settings["learning_rate"]
    return TorchWorkload(place, lambda: classifier(maxer(), learning_rate), lambda rows: as_tensors(grey_noise(rows)))


def maxer() -> nn.Sequential:
    """The seed's network for MNIST, with far more layers than it needs: 78,923,530 parameters. It never converges."""
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


def build_mnist(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place, also under nn.DataParallel; settings: `filters`, `dense`, `learning_rate`."""
    network, learning_rate = (settings["filters"], settings["dense"]), settings["learning_rate"]
    lay = lay_for(place, {"dataparallel": data_parallel})
    return TorchWorkload(place, lambda: classifier(mnist(*network), learning_rate), mnist_batch, lay)


def mnist(filters: int, dense: int) -> nn.Sequential:
    """Two convolutions and two dense layers: images (samples, 1, 28, 28) to logits (samples, 10)."""
    blocks: list[nn.Module] = []
    for before, after in ((1, filters), (filters, 2 * filters)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = (nn.Flatten(), nn.Linear(2 * filters * 7 * 7, dense), nn.ReLU(), nn.Linear(dense, 10))
    return nn.Sequential(*blocks, *head)


def mnist_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Pictures (rows, 1, 28, 28) in 0 to 1 and their digits (rows,)."""
    return as_tensors(digits(rows))


def data_parallel(module: Any, devices: tuple[torch.device, ...]) -> Any:
    """The module over all devices of one process, every batch cut evenly; RequestError where there are no GPUs.

    On CPUs DataParallel would do nothing.
    """
    if devices[0].type != "cuda":
        raise RequestError(
            "nn.DataParallel works on GPUs alone; on CPUs it would quietly run on one device.",
            "On CPU slices, measure the split: it has a process for each.",
        )
    return nn.DataParallel(module, device_ids=list(devices))


def build_gru(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `steps`, `features`, `units`, `layers`, `dense`, `classes`."""
    shape = {key: settings[key] for key in ("features", "units", "layers", "dense", "classes")}
    waves = {key: settings[key] for key in ("steps", "features", "classes")}
    return TorchWorkload(
        place,
        lambda: classifier(GruNet(**shape), settings["learning_rate"]),
        lambda rows: as_tensors(sine_waves(rows, **waves)),
    )


class GruNet(nn.Module):  # type: ignore[misc]  # torch is not followed
    """`layers` GRUs of `units`, then a dense layer and logits; its step time is flat up to large batches."""

    def __init__(self, features: int, units: int, layers: int, dense: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(features, units, layers, batch_first=True)
        self.head = nn.Sequential(nn.Linear(units, dense), nn.ReLU(), nn.Linear(dense, classes))

    def forward(self, sequences: Tensor) -> Tensor:
        """Sequences (samples, steps, features) to logits (samples, classes)."""
        states, _ = self.recurrent(sequences)
        logits: Tensor = self.head(states[:, -1])
        return logits
