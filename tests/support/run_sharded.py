"""Programs whose models are sharded by FSDP.

`evener run` trains those whose losses are means with the plan's shares.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp  # imported as a module, since it is patched later
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint

from tests.support.run_parts import Programs, epochs, load, naming, update

CPU = torch.device("cpu")
PROGRAMS: Programs = {}
program = naming(PROGRAMS)


def layers(mesh: Any = None, own: int = 0) -> Any:
    """Return a network whose layers are each sharded, except the last `own` ones."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
        nn.Linear(16, 3),
    )
    for layer in list(model)[: len(model) - own]:
        fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def whole(model: Any) -> nn.ParameterList:
    """Return the weights of all ranks."""
    every = (
        each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()
    )
    return nn.ParameterList([nn.Parameter(each.detach().clone()) for each in every])


def train(model: Any, loss: Any = F.cross_entropy, clipped: bool = False, **options: Any) -> Any:
    """Train with AdamW and return the weights of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, classes, _ in epochs(load(**options)):
        optimizer.zero_grad()
        loss(model(x), classes).backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return whole(model)


@program
def sharded() -> Any:
    return train(layers())


@program
def sharded_and_clipped() -> Any:
    """Clips gradients; the outermost module has a layer of its own."""
    return train(layers(own=1), clipped=True)


@program
def sharded_and_replicated() -> Any:
    return train(layers(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))))


@program
def sharded_and_checkpointed() -> Any:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = fsdp.fully_shard(nn.Linear(6, 16))
            self.last = fsdp.fully_shard(nn.Linear(16, 3))

        def forward(self, x: Tensor) -> Any:
            return self.last(checkpoint(self.first, x, use_reentrant=False).tanh())

    return train(fsdp.fully_shard(Recomputed()))


@program
def sharded_and_accumulated() -> Any:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, (x, classes, _) in enumerate(epochs(load(drop_last=True)), 1):
        model.set_requires_gradient_sync(number % 2 == 0)
        (F.cross_entropy(model(x), classes) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


@program
def sharded_with_the_loss_inside() -> Any:
    """The model computes its loss, as transformers' models do."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = fsdp.fully_shard(nn.Linear(6, 3))

        def forward(self, x: Tensor, classes: Tensor) -> Any:
            return F.cross_entropy(self.net(x), classes)

    model = fsdp.fully_shard(WithLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, classes, _ in epochs(load()):
        update(optimizer, model(x, classes))
    return whole(model)


def wrapped(**options: Any) -> Any:
    """Return a network wrapped by FSDP1."""
    layer = fsdp.FullyShardedDataParallel(nn.Linear(6, 16), device_id=CPU, **options)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 3))
    return fsdp.FullyShardedDataParallel(model, device_id=CPU, **options)


def gathered(model: Any) -> nn.ParameterList:
    """Return the weights of a network in FSDP1."""
    with fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return nn.ParameterList(
            [nn.Parameter(each.detach().clone()) for each in model.parameters()]
        )


@program
def in_fsdp1() -> Any:
    model = wrapped()
    train(model)
    return gathered(model)


@program
def in_fsdp1_with_its_own_parameters() -> Any:
    model = wrapped(use_orig_params=True)
    train(model)
    return gathered(model)


@program
def gradients_alone_in_fsdp1() -> Any:
    model = wrapped(sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP)
    train(model)
    return gathered(model)


@program
def accumulated_in_fsdp1() -> Any:
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, (x, classes, _) in enumerate(epochs(load(drop_last=True)), 1):
        with nullcontext() if number % 2 == 0 else model.no_sync():
            (F.cross_entropy(model(x), classes) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return gathered(model)


@program
def a_sum_in_fsdp1() -> Any:
    model = wrapped()
    train(model, lambda out, classes: F.cross_entropy(out, classes, reduction="sum"))
    return gathered(model)


@program
def a_sum_of_a_sharded_model() -> Any:
    return train(layers(), lambda out, classes: F.cross_entropy(out, classes, reduction="sum"))


@program
def parts_of_a_layer() -> Any:
    """Tensor parallelism: both ranks compute each row."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(model(x[:2]), classes[:2]))
    return whole(model)
