"""What the shipped models share: Adam and cross-entropy, batches as tensors, and where their parts lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.errors import RequestError
from evener.workloads.protocol import Place
from evener.workloads.torch_backend.workload import Lay, Recipe


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
    """How to place the parts; None for one device. RequestError for an unknown name or too few devices."""
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
