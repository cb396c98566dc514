"""Train an FSDP-sharded model in a plain loop: `sharded_loop.py 1|2` (FSDP1 or FSDP2)."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def shard(model: nn.Sequential, version: str) -> Any:
    """Shard two of the model's layers, and the model."""
    if version == "2":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model)
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for place in (0, 2):
        model[place] = FullyShardedDataParallel(model[place], **options)
    return FullyShardedDataParallel(model, **options)


def main() -> None:
    """Train a classifier in float32."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    drawn = torch.Generator().manual_seed(1)
    rows = TensorDataset(
        torch.randn(96, 6, generator=drawn), torch.randint(0, 3, (96,), generator=drawn)
    )
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    model = shard(nn.Sequential(*layers), sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, seed=3)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
