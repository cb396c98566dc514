"""Training programs as users write them that would learn something else, and are refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from tests.support.torch_program_parts import (
    CLASSES,
    early,
    network,
    refused,
    sgd,
    shard,
    split_by,
    train,
    update,
    weights,
)


@refused("split.wrap(accelerator.prepare(model))")
def a_ddp_that_nothing_weighs(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """accelerator.prepare(model, optimizer, loader): the loader is left as it is."""
    split = split_by(shares)
    model = DistributedDataParallel(network())
    train(model, split.loader(rows))
    return weights(model)


@refused("no shares to rebalance")
def rows_dealt_by_length_that_rebalance(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split_by(shares, rebalance=True).loader(rows, lengths=list(range(len(rows))))
    return []


@refused("Rank 1 has rebalance=True, rank 0 has rebalance=False")
def rebalance_on_one_rank(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split_by(shares, rebalance=os.environ["RANK"] == "1")
    return []


@refused("Rank 1 has weigh='loss', rank 0 has weigh='gradients'")
def losses_weighed_on_one_rank(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split_by(shares, weigh="loss" if os.environ["RANK"] == "1" else "gradients")
    return []


@refused("by another plan, or at another global batch")
def other_ratios_on_one_rank(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split_by(shares[::-1] if os.environ["RANK"] == "1" else shares)
    return []


@refused("so none has times of its own to rebalance by")
def a_sharded_model_that_rebalances(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares, rebalance=True, weigh="loss")
    return weights(split.wrap(shard(split, network())))


@refused("by FSDP or SyncBatchNorm")
def a_model_normalized_over_ranks_that_rebalances(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares, rebalance=True, weigh="loss")
    return weights(split.wrap(nn.SyncBatchNorm(4)))


@refused("One backward pass mixes two batches")
def two_loaders_in_one_backward_pass_that_rebalance(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    """Their shares may change at different steps."""
    split = split_by(shares, rebalance=True)
    model = split.wrap(network())
    optimizer = sgd(model)
    for (inputs, labels), (others, more) in zip(
        split.loader(rows), split.loader(rows, seed=1), strict=True
    ):
        update(
            optimizer, F.cross_entropy(model(inputs), labels) + F.cross_entropy(model(others), more)
        )
    return weights(model)


@refused("split.begin")
def a_loader_that_was_sharded_again(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    """accelerator.prepare of a DataLoader made from the loader's parts."""
    split = split_by(shares)
    loader = split.loader(rows)
    model = split.wrap(network())
    train(
        model, DataLoader(rows, batch_sampler=list(loader.batch_sampler)[split.rank :: split.world])
    )
    return weights(model)


@refused("no batch of split.loader")
def another_loader_in_eval_mode(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """As for a model whose normalization is frozen."""
    split = split_by(shares)
    model = split.wrap(network()).eval()
    train(model, DataLoader(rows, 4, sampler=DistributedSampler(rows)))
    return weights(model)


@refused("split.loader")
def no_loader_of_the_split(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    train(model, DataLoader(rows, 4, sampler=DistributedSampler(rows)))
    return weights(model)


@refused("split.wrap")
def never_wrapped(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = network()
    split.wrap(model)  # and the result is dropped
    train(model, split.loader(rows))
    return weights(model)


@refused("another DistributedDataParallel")
def a_ddp_around_the_wrapped_model(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    """accelerator.prepare(split.wrap(model))."""
    split = split_by(shares)
    model = DistributedDataParallel(split.wrap(network()))
    train(model, split.loader(rows))
    return weights(model)


@refused("exchanged twice")
def a_ddp_within_the_wrapped_model(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(
        nn.Sequential(DistributedDataParallel(network()), nn.Linear(CLASSES, CLASSES).double())
    )
    return weights(model)


@refused("gradients aren't weighted")
def a_trainer_with_closures(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """As Lightning calls optimizers, without split.wrap."""
    split = split_by(shares)
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    for inputs, labels in split.loader(rows):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure=closure)
    return weights(model)


@refused("weigh='loss'")
def sharded_parameters_that_nothing_weighs(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares)
    model = shard(split, network())
    train(model, split.loader(rows))
    return weights(model)


@refused("FSDP")
def sharded_parameters_weighed_by_gradients(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares)
    return weights(split.wrap(shard(split, network())))


@refused("split.scale(loss)")
def scale_forgotten(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares, weigh="loss")
    model = split.wrap(network())
    train(model, split.loader(rows))
    return weights(model)


@refused("split.scale(loss)")
def scale_forgotten_for_one_of_two_models(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares, weigh="loss")
    first, second = split.wrap(network()), split.wrap(network())
    for inputs, labels in split.loader(rows):
        split.scale(F.cross_entropy(first(inputs), labels)).backward()
        F.cross_entropy(second(inputs), labels).backward()
    return weights(first, second)


@refused("split.scale(loss)")
def scale_forgotten_with_sharded_parameters(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares, weigh="loss")
    model = split.wrap(shard(split, network()))
    train(model, split.loader(rows))
    return weights(model)


@refused("copy.deepcopy(model.module)")
def a_copy_of_a_wrapped_model(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = copy.deepcopy(split.wrap(network()))
    train(model, split.loader(rows))
    return weights(model)


@refused("frozen when split.wrap was called")
def layers_unfrozen(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    net = network()
    net[0].requires_grad_(False)
    model, loader = split.wrap(net), split.loader(rows)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, loader, optimizer)
    net[0].requires_grad_(True)
    train(model, loader, optimizer)
    return weights(model)


@refused("weren't in the model when split.wrap")
def layers_added(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    net = network()
    model, loader = split.wrap(net), split.loader(rows)
    optimizer = sgd(model)
    train(model, loader, optimizer)
    net.append(nn.Linear(CLASSES, CLASSES).double().to(split.device))
    optimizer.add_param_group({"params": list(net[-1].parameters())})
    train(model, loader, optimizer)
    return weights(model)


@refused("weren't in the model when split.wrap")
def a_parameter_in_another_ones_place(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    """The optimizer has as many as before."""
    split = split_by(shares)
    net = network()
    model, loader = split.wrap(net), split.loader(rows)
    optimizer = sgd(model)
    train(model, loader, optimizer)
    net[2].weight = nn.Parameter(net[2].weight.detach().clone())
    optimizer.param_groups[0]["params"][:] = net.parameters()
    train(model, loader, optimizer)
    return weights(model)


@refused("not model.module")
def the_model_inside(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    train(model.module, split.loader(rows))
    return weights(model)


@refused("One backward pass mixes two batches")
def two_loaders_of_other_lengths(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = sgd(model)
    for (inputs, labels), (others, _) in zip(
        split.loader(rows), split.loader(Subset(rows, range(19))), strict=False
    ):
        update(optimizer, F.cross_entropy(model(inputs), labels) + model(others).square().mean())
    return weights(model)


@refused("One backward pass mixes two batches")
def losses_summed_over_batches(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    update(
        sgd(model),
        sum(F.cross_entropy(model(inputs), labels) for inputs, labels in split.loader(rows)),
    )
    return weights(model)


@refused("isn't clear which")
def the_next_batch_early_and_changed(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    train(model, early(split.loader(rows), lambda batch: (batch[0] * 2, batch[1] + 0)))
    return weights(model)


@refused("isn't clear which")
def two_loaders_changed(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    half = split.loader(Subset(rows, range(19)))
    for (inputs, _), _others in zip(split.loader(rows), half, strict=False):
        model(inputs * 2).square().mean().backward()
    return weights(model)


@refused("No batch is in hand")
def rows_after_the_pass(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    for _ in split.loader(rows):
        pass
    return [rows.tensors[0][: split.rows]]


@refused("one row for each row")
def gather_of_other_rows(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    for inputs, _ in split.loader(rows):
        split.gather(torch.cat([inputs, inputs]))
    return []


@refused("differ in type or shape")
def gather_of_other_shapes(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    for inputs, _ in split.loader(rows):
        split.gather(inputs[:, split.rank :])
    return []


@refused("different orders")
def an_order_that_ranks_draw_apart(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    split = split_by(shares)
    next(iter(split.loader(rows, order=DistributedSampler(rows))))
    return []


@refused("stream")
def a_stream_with_a_length(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return len(rows)

        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    split_by(shares).loader(Stream())
    return []


@refused("order=")
def a_sampler(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split_by(shares).loader(rows, sampler=torch.utils.data.SequentialSampler(rows))
    return []
