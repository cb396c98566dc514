"""Losses, loaders and batches as users write them, which ranks must learn exactly as one process
does.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.data import Subset

from tests.support.torch_program_parts import (
    CLASSES,
    Given,
    Weights,
    early,
    exact,
    network,
    sgd,
    shard,
    train,
    update,
    weights,
)


@exact
def contrastive(given: Given) -> Weights:
    """In-batch negatives with a learned temperature, as in CLIP."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = network(4), network(4)
            self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return (
                F.normalize(self.left(inputs)),
                F.normalize(self.right(inputs.cos())),
                self.scale.exp(),
            )

    split = given.split()
    model = split.wrap(Towers())
    optimizer, losses = sgd(model), []
    for inputs, _ in split.loader(given.rows):
        left, right, scale = model(inputs)
        scores = scale * split.gather(left) @ split.gather(right).T
        numbers = torch.arange(len(scores), device=scores.device)
        loss = (F.cross_entropy(scores, numbers) + F.cross_entropy(scores.T, numbers)) / 2
        update(optimizer, loss)
        losses.append(split.mean(loss))
    return [*weights(model), torch.tensor(losses, dtype=torch.float64)]


@exact
def contrastive_by_own_rows(given: Given) -> Weights:
    """Each rank compares its own rows with all rows, and adds a mean over its rows.

    Both ways of weighting are tested.
    """
    ended = []
    for weigh in ("gradients", "loss"):
        split = given.split(weigh=weigh)
        model = split.wrap(network(4))
        optimizer = sgd(model)
        for inputs, _ in split.loader(given.rows):
            found = F.normalize(model(inputs))
            everyone = split.gather(found)
            numbers = (inputs[:, None] == split.gather(inputs)).all(2).int().argmax(1)
            loss = F.cross_entropy(found @ everyone.T, numbers) + (found**4).mean()
            update(optimizer, split.scale(loss) if weigh == "loss" else loss)
        ended += weights(model)
    return ended


@exact
def triplets(given: Given) -> Weights:
    """Uses the hardest positive and negative in the whole batch for each row."""
    split = given.split()
    model = split.wrap(network(4))
    optimizer = sgd(model)
    for inputs, labels in split.loader(given.rows):
        found, kinds = split.gather(model(inputs)), split.gather(labels)
        far = torch.cdist(found, found)
        same = kinds[:, None] == kinds
        loss = (
            (far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 9.0).amin(1) + 0.5)
            .relu()
            .mean()
        )
        update(optimizer, loss)
    return weights(model)


@exact
def two_loaders(given: Given) -> Weights:
    """Two loaders of the same length, with one backward pass for both."""
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    for (inputs, labels), (others, _) in zip(
        split.loader(given.rows), split.loader(given.rows, seed=1), strict=True
    ):
        update(
            optimizer, F.cross_entropy(model(inputs), labels) + model(others * 2).square().mean()
        )
    return weights(model)


@exact
def two_loaders_a_backward_pass_each(given: Given) -> Weights:
    """Two loaders of different lengths, with a backward pass for each."""
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    half = Subset(given.rows, range(19))
    for (inputs, labels), (others, _) in zip(
        split.loader(given.rows), split.loader(half), strict=False
    ):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        model(others).square().mean().backward()
        optimizer.step()
    return weights(model)


@exact
def two_batches_before_their_backward_passes(given: Given) -> Weights:
    """Two models, whose batches have different sizes at the end of an epoch."""
    split = given.split()
    models = split.wrap(network()), split.wrap(network())
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], 0.2)
    loaders = split.loader(given.rows), split.loader(Subset(given.rows, range(19)))
    for batches in zip(*loaders, strict=False):
        losses = [
            F.cross_entropy(model(inputs), labels)
            for model, (inputs, labels) in zip(models, batches, strict=True)
        ]
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        optimizer.step()
    return weights(*models)


@exact
def the_next_batch_early(given: Given) -> Weights:
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, early(loader), optimizer)
    return weights(model)


@exact
def the_next_batch_early_over_the_ends_of_epochs(given: Given) -> Weights:
    """Fetches the first batch of an epoch before it trains on the short last one of the epoch
    before.
    """
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    train(model, early(chain(loader, loader, loader)))
    return weights(model)


@exact
def a_list_of_batches(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    train(model, list(split.loader(given.rows)) * 2)
    return weights(model)


@exact
def one_batch_for_long(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    inputs, labels = next(iter(split.loader(given.rows)))
    inputs = inputs * 2
    for _ in range(5):
        update(optimizer, F.cross_entropy(model(inputs), labels))
    return weights(model)


@exact
def batches_skipped(given: Given) -> Weights:
    """Skips the first batches, and changes the rows of the others before the model gets them."""
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(split.loader(given.rows)):
        if step < 3:
            continue
        update(optimizer, F.cross_entropy(model(inputs / 2), labels))
    return weights(model)


@exact
def validation_within_steps(given: Given) -> Weights:
    """Validates one batch in each step, without no_grad."""
    split = given.split()
    model = split.wrap(network())
    held_out = split.loader(Subset(given.rows, range(13)), training=False)
    optimizer, validation, losses = sgd(model), iter(held_out), []
    for inputs, labels in split.loader(given.rows):
        other = next(validation, None)
        if other is not None:
            model.eval()
            losses.append(split.mean(F.cross_entropy(model(other[0] + 0.0), other[1])))
            model.train()
        update(optimizer, F.cross_entropy(model(inputs * 1.0), labels))
    return [*weights(model), torch.tensor(losses, dtype=torch.float64)]


@exact
def predictions_after_the_loop(given: Given) -> Weights:
    """Predicts all rows without no_grad, also by looping over the training loader."""
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    train(model, loader)
    model.eval()
    right = sum(
        int((model(inputs).argmax(1) == labels)[: split.rows].sum()) for inputs, labels in loader
    )
    return [model(given.rows.tensors[0]).detach(), torch.tensor(split.total(right))]


@exact
def metrics(given: Given) -> Weights:
    """Counts each row once: without trimming in validation, with gather in training.

    It sums a confusion matrix with total.
    """
    split = given.split()
    model = split.wrap(network())
    matrix, counted = torch.zeros(CLASSES, CLASSES, dtype=torch.int64), 0
    with torch.no_grad():
        for inputs, labels in split.loader(given.rows, training=False):
            found = model(inputs).argmax(1)
            matrix.index_put_((labels, found), torch.tensor(1), accumulate=True)
            counted += len(found)
        seen = torch.cat([split.gather(labels) for _, labels in split.loader(given.rows)])
        flags = torch.cat(
            [split.gather(labels == 1) for _, labels in split.loader(given.rows, seed=1)]
        )
    assert split.total(counted) == len(given.rows)
    return [split.total(matrix), seen, flags]


@exact
def an_order_by_a_sampler(given: Given) -> Weights:
    split = given.split()
    drawn = torch.utils.data.WeightedRandomSampler(
        1.0 + torch.arange(len(given.rows)), len(given.rows)
    )
    model, loader = split.wrap(network()), split.loader(given.rows, order=drawn)
    torch.manual_seed(split.rank)  # ranks draw the same order even if their random numbers differ
    optimizer = sgd(model)
    for _ in range(2):
        train(model, loader, optimizer)
    again = split.loader(given.rows, order=drawn)
    state = loader.state_dict()
    again.load_state_dict({**state, "position": 16})
    train(model, again, optimizer)
    return weights(model)


@exact
def an_order_by_the_epoch(given: Given) -> Weights:
    """Sorts rows by a column that depends on the epoch."""
    split = given.split()

    def order(epoch: int) -> list[int]:
        numbers: list[int] = given.rows.tensors[0][:, epoch].argsort().tolist()
        return numbers

    model, loader = split.wrap(network()), split.loader(given.rows, order=order)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, loader, optimizer)
    return weights(model)


@exact
def a_subset_that_was_drawn(given: Given) -> Weights:
    split = given.split()
    drawn = torch.randint(
        0, len(given.rows), (33,), generator=torch.Generator().manual_seed(6)
    ).tolist()
    model = split.wrap(network())
    train(model, split.loader(Subset(given.rows, drawn)))
    return weights(model)


@exact
def weighed_by_the_loss(given: Given) -> Weights:
    split = given.split(weigh="loss")
    model = split.wrap(network())
    optimizer = sgd(model)
    for inputs, labels in early(split.loader(given.rows)):
        update(optimizer, split.scale(F.cross_entropy(model(inputs), labels)))
    return weights(model)


@exact
def sharded_parameters(given: Given) -> Weights:
    """FSDP2 models, wrapped by the split and not."""
    split = given.split(weigh="loss")
    ended = []
    for wrap in (True, False):
        model = shard(split, network())
        optimizer = sgd(split.wrap(model) if wrap else model)
        for inputs, labels in split.loader(given.rows):
            update(optimizer, split.scale(F.cross_entropy(model(inputs), labels)))
        ended += [each.full_tensor() if split.world > 1 else each for each in weights(model)]
    return ended


@exact
def a_mean_over_tokens(given: Given) -> Weights:
    """Computes the loss outside of the model, with split.loss, as users are told to."""
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    for inputs, labels in split.loader(given.rows):
        total = F.cross_entropy(model(inputs), labels, ignore_index=1, reduction="sum")
        update(optimizer, split.loss(total, (labels != 1).sum()))
    return weights(model)
