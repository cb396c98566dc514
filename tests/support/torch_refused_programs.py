"""Training programs as users write them that would learn something else, and so are refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, random_split

from tests.support.torch_program_parts import (
    CLASSES,
    Given,
    Weights,
    early,
    network,
    refused,
    sgd,
    shard,
    train,
    update,
    weights,
)


@refused("split.wrap(accelerator.prepare(model))")
def a_ddp_that_nothing_weighs(given: Given) -> Weights:
    """Like accelerator.prepare(model, optimizer, loader), which doesn't change the loader."""
    split = given.split()
    model = DistributedDataParallel(network())
    train(model, split.loader(given.rows))
    return weights(model)


@refused("no shares to rebalance")
def rows_assigned_by_length_that_rebalance(given: Given) -> Weights:
    given.split(rebalance=True).loader(given.rows, lengths=list(range(len(given.rows))))
    return []


@refused("Rank 1 has rebalance=True, rank 0 has rebalance=False")
def rebalance_on_one_rank(given: Given) -> Weights:
    given.split(rebalance=os.environ["RANK"] == "1")
    return []


@refused("Rank 1 has weigh='loss', rank 0 has weigh='gradients'")
def losses_weighed_on_one_rank(given: Given) -> Weights:
    given.split(weigh="loss" if os.environ["RANK"] == "1" else "gradients")
    return []


@refused("with another plan, or another global batch")
def other_ratios_on_one_rank(given: Given) -> Weights:
    own = given.turned() if os.environ["RANK"] == "1" else given
    own.split()
    return []


@refused("so none has times of its own to rebalance by")
def a_sharded_model_that_rebalances(given: Given) -> Weights:
    split = given.split(rebalance=True, weigh="loss")
    return weights(split.wrap(shard(split, network())))


@refused("by FSDP or SyncBatchNorm")
def a_model_normalized_over_ranks_that_rebalances(given: Given) -> Weights:
    split = given.split(rebalance=True, weigh="loss")
    return weights(split.wrap(nn.SyncBatchNorm(4)))


@refused("One backward pass mixes two batches")
def two_loaders_in_one_backward_pass_that_rebalance(given: Given) -> Weights:
    """The two loaders could change shares at different steps."""
    split = given.split(rebalance=True)
    model = split.wrap(network())
    optimizer = sgd(model)
    for (inputs, labels), (others, more) in zip(
        split.loader(given.rows), split.loader(given.rows, seed=1), strict=True
    ):
        update(
            optimizer, F.cross_entropy(model(inputs), labels) + F.cross_entropy(model(others), more)
        )
    return weights(model)


@refused("split.begin")
def a_loader_that_was_sharded_again(given: Given) -> Weights:
    """Like accelerator.prepare of a DataLoader built from the loader's batch sampler."""
    split = given.split()
    loader = split.loader(given.rows)
    model = split.wrap(network())
    train(
        model,
        DataLoader(given.rows, batch_sampler=list(loader.batch_sampler)[split.rank :: split.world]),
    )
    return weights(model)


@refused("no current batch of split.loader")
def another_loader_in_eval_mode(given: Given) -> Weights:
    """Like training with frozen normalization layers."""
    split = given.split()
    model = split.wrap(network()).eval()
    train(model, DataLoader(given.rows, 4, sampler=DistributedSampler(given.rows)))
    return weights(model)


@refused("split.loader")
def no_loader_of_the_split(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    train(model, DataLoader(given.rows, 4, sampler=DistributedSampler(given.rows)))
    return weights(model)


@refused("split.wrap")
def never_wrapped(given: Given) -> Weights:
    split = given.split()
    model = network()
    split.wrap(model)  # the result is dropped
    train(model, split.loader(given.rows))
    return weights(model)


@refused("another DistributedDataParallel")
def a_ddp_around_the_wrapped_model(given: Given) -> Weights:
    """Like accelerator.prepare(split.wrap(model))."""
    split = given.split()
    model = DistributedDataParallel(split.wrap(network()))
    train(model, split.loader(given.rows))
    return weights(model)


@refused("exchanged twice")
def a_ddp_within_the_wrapped_model(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(
        nn.Sequential(DistributedDataParallel(network()), nn.Linear(CLASSES, CLASSES).double())
    )
    return weights(model)


@refused("gradients aren't weighted")
def a_trainer_with_closures(given: Given) -> Weights:
    """Calls the optimizer as Lightning does, without split.wrap."""
    split = given.split()
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    for inputs, labels in split.loader(given.rows):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure=closure)
    return weights(model)


@refused("weigh='loss'")
def sharded_parameters_that_nothing_weighs(given: Given) -> Weights:
    split = given.split()
    model = shard(split, network())
    train(model, split.loader(given.rows))
    return weights(model)


@refused("FSDP")
def sharded_parameters_weighed_by_gradients(given: Given) -> Weights:
    split = given.split()
    return weights(split.wrap(shard(split, network())))


@refused("split.scale(loss)")
def scale_forgotten(given: Given) -> Weights:
    split = given.split(weigh="loss")
    model = split.wrap(network())
    train(model, split.loader(given.rows))
    return weights(model)


@refused("split.scale(loss)")
def scale_forgotten_for_one_of_two_models(given: Given) -> Weights:
    split = given.split(weigh="loss")
    first, second = split.wrap(network()), split.wrap(network())
    for inputs, labels in split.loader(given.rows):
        split.scale(F.cross_entropy(first(inputs), labels)).backward()
        F.cross_entropy(second(inputs), labels).backward()
    return weights(first, second)


@refused("split.scale(loss)")
def scale_forgotten_with_sharded_parameters(given: Given) -> Weights:
    split = given.split(weigh="loss")
    model = split.wrap(shard(split, network()))
    train(model, split.loader(given.rows))
    return weights(model)


@refused("copy.deepcopy(model.module)")
def a_copy_of_a_wrapped_model(given: Given) -> Weights:
    split = given.split()
    model = copy.deepcopy(split.wrap(network()))
    train(model, split.loader(given.rows))
    return weights(model)


@refused("frozen when split.wrap was called")
def layers_unfrozen(given: Given) -> Weights:
    split = given.split()
    net = network()
    net[0].requires_grad_(False)
    model, loader = split.wrap(net), split.loader(given.rows)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, loader, optimizer)
    net[0].requires_grad_(True)
    train(model, loader, optimizer)
    return weights(model)


@refused("weren't in the model when split.wrap")
def layers_added(given: Given) -> Weights:
    split = given.split()
    net = network()
    model, loader = split.wrap(net), split.loader(given.rows)
    optimizer = sgd(model)
    train(model, loader, optimizer)
    net.append(nn.Linear(CLASSES, CLASSES).double().to(split.device))
    optimizer.add_param_group({"params": list(net[-1].parameters())})
    train(model, loader, optimizer)
    return weights(model)


@refused("weren't in the model when split.wrap")
def a_parameter_in_another_ones_place(given: Given) -> Weights:
    """Replaces a parameter, so that the optimizer has as many as before."""
    split = given.split()
    net = network()
    model, loader = split.wrap(net), split.loader(given.rows)
    optimizer = sgd(model)
    train(model, loader, optimizer)
    net[2].weight = nn.Parameter(net[2].weight.detach().clone())
    optimizer.param_groups[0]["params"][:] = net.parameters()
    train(model, loader, optimizer)
    return weights(model)


@refused("not model.module")
def the_model_inside(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    train(model.module, split.loader(given.rows))
    return weights(model)


@refused("One backward pass mixes two batches")
def two_loaders_of_other_lengths(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    for (inputs, labels), (others, _) in zip(
        split.loader(given.rows), split.loader(Subset(given.rows, range(19))), strict=False
    ):
        update(optimizer, F.cross_entropy(model(inputs), labels) + model(others).square().mean())
    return weights(model)


@refused("One backward pass mixes two batches")
def losses_summed_over_batches(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    update(
        sgd(model),
        sum(F.cross_entropy(model(inputs), labels) for inputs, labels in split.loader(given.rows)),
    )
    return weights(model)


@refused("isn't clear which")
def the_next_batch_early_and_changed(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    train(model, early(split.loader(given.rows), lambda batch: (batch[0] * 2, batch[1] + 0)))
    return weights(model)


@refused("isn't clear which")
def two_loaders_changed(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    half = split.loader(Subset(given.rows, range(19)))
    for (inputs, _), _others in zip(split.loader(given.rows), half, strict=False):
        model(inputs * 2).square().mean().backward()
    return weights(model)


@refused("There is no current batch")
def rows_after_the_pass(given: Given) -> Weights:
    split = given.split()
    for _ in split.loader(given.rows):
        pass
    return [given.rows.tensors[0][: split.rows]]


@refused("one row for each row")
def gather_of_other_rows(given: Given) -> Weights:
    split = given.split()
    for inputs, _ in split.loader(given.rows):
        split.gather(torch.cat([inputs, inputs]))
    return []


@refused("differ in type or shape")
def gather_of_other_shapes(given: Given) -> Weights:
    split = given.split()
    for inputs, _ in split.loader(given.rows):
        split.gather(inputs[:, split.rank :])
    return []


@refused("different orders")
def an_order_that_ranks_draw_apart(given: Given) -> Weights:
    split = given.split()
    next(iter(split.loader(given.rows, order=DistributedSampler(given.rows))))
    return []


@refused("stream")
def a_stream_with_a_length(given: Given) -> Weights:
    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return len(given.rows)

        def __iter__(self) -> Iterator[Any]:
            return iter(given.rows)

    given.split().loader(Stream())
    return []


@refused("order=")
def a_sampler(given: Given) -> Weights:
    given.split().loader(given.rows, sampler=torch.utils.data.SequentialSampler(given.rows))
    return []


@refused("The data sets of the ranks differ: row ")
def rows_that_each_rank_splits_for_itself(given: Given) -> Weights:
    split = given.split()
    drawn = torch.Generator().manual_seed(split.rank)
    some, _ = random_split(given.rows, [len(given.rows) - 5, 5], generator=drawn)
    model = split.wrap(network())
    train(model, split.loader(some))
    return weights(model)


@refused("The data sets of the ranks differ: row ")
def sharded_parameters_and_rows_divided_by_rank(given: Given) -> Weights:
    split = given.split(weigh="loss")
    model = shard(split, network())
    optimizer = sgd(model)
    own = Subset(given.rows, range(split.rank, split.rank + 16))
    for inputs, labels in split.loader(own):
        update(optimizer, split.scale(F.cross_entropy(model(inputs), labels)))
    return weights(model)
