"""Train a small model with DeepSpeed in a plain loop in float32: `deep.py STAGE`.

DeepSpeed's shared-memory all-reduce is disabled, because it would be compiled at the first start.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train a classifier."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=int)
    parser.add_argument("--training_data", action="store_true", help="let DeepSpeed make a loader")
    parser.add_argument("--local_rank", type=int)
    given = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    drawn = torch.Generator().manual_seed(1)
    rows = TensorDataset(
        torch.randn(96, 6, generator=drawn), torch.randint(0, 3, (96,), generator=drawn)
    )
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        training_data=rows if given.training_data else None,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": given.stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    sampler: DistributedSampler[object] = DistributedSampler(rows, seed=3)
    if not given.training_data:
        loader = DataLoader(rows, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
    dist.barrier()


if __name__ == "__main__":
    main()
