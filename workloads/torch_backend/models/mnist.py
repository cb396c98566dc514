"""A small convolutional network on pictures of digits made in code: PyTorch's default on CPU slices.

Also under nn.DataParallel, the rival that cuts every batch evenly, on GPUs alone. Source: the slides on several GPUs,
"Data Parallel in PyTorch". One process feeds all GPUs: each step it sends the weights to each, cuts the batch evenly
whatever the GPUs are, and gathers the outputs on the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from evener.errors import RequestError
from evener.workloads.datasets import digits
from evener.workloads.protocol import Place, Workload
from evener.workloads.torch_backend.classifiers import as_tensors, classifier, lay_for
from evener.workloads.torch_backend.workload import TorchWorkload


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `filters`, `dense`, `learning_rate`."""
    network, learning_rate = (settings["filters"], settings["dense"]), settings["learning_rate"]
    lay = lay_for(place, {"dataparallel": data_parallel})
    return TorchWorkload(place, lambda: classifier(model(*network), learning_rate), sample_batch, lay)


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


def sample_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (rows, 1, 28, 28) in 0 to 1 and their digits (rows,)."""
    return as_tensors(digits(rows))


def data_parallel(module: Any, devices: tuple[torch.device, ...]) -> Any:
    """The module over all devices; RequestError where there are no GPUs, as DataParallel would then do nothing."""
    if devices[0].type != "cuda":
        raise RequestError(
            "nn.DataParallel works on GPUs alone; on CPUs it would quietly run on one device.",
            "On CPU slices, measure the split: it uses DistributedDataParallel.",
        )
    return nn.DataParallel(module, device_ids=list(devices))
