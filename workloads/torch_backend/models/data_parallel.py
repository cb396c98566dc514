"""torch_mnist under nn.DataParallel: the rival that cuts every batch evenly, in one process.

Source: the slides on several GPUs, "Data Parallel in PyTorch". One process feeds all GPUs: each step it sends the
weights to each, cuts the batch evenly whatever the GPUs are, and gathers the outputs on the first. On GPUs alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from evener.errors import RequestError
from evener.workloads.protocol import Place, Workload
from evener.workloads.torch_backend.models.mnist import model, sample_batch
from evener.workloads.torch_backend.placements import cross_entropy, lay_for
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload

SETTINGS: dict[str, Any] = {"filters": 16, "dense": 64, "learning_rate": 0.001}


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `filters`, `dense`, `learning_rate`."""
    lay = lay_for(place, {"dataparallel": data_parallel})
    return TorchWorkload(place, partial(recipe, **{**SETTINGS, **settings}), sample_batch, lay)


def recipe(filters: int, dense: int, learning_rate: float) -> Recipe:
    """The network with Adam and cross-entropy."""
    module = model(filters, dense)
    return Recipe(module, torch.optim.Adam(module.parameters(), learning_rate), cross_entropy)


def data_parallel(module: Any, devices: tuple[torch.device, ...]) -> Any:
    """The module over all devices; RequestError where there are no GPUs, as DataParallel would then do nothing."""
    if devices[0].type != "cuda":
        raise RequestError(
            "nn.DataParallel works on GPUs alone; on CPUs it would quietly run on one device.",
            "On CPU slices, measure the split: it uses DistributedDataParallel.",
        )
    return nn.DataParallel(module, device_ids=list(devices))
