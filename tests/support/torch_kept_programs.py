"""Loops over data sets that keep each row as a tensor, with a collate function that only makes
lists.

The tensors of old batches then live as long as the data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.data import Dataset, TensorDataset

from tests.support.torch_program_parts import (
    Given,
    Weights,
    early,
    exact,
    network,
    sgd,
    update,
    weights,
)

EPOCHS = 4


class Kept(Dataset[Any]):
    """Rows that are the same tensors each time, or new views of one tensor."""

    def __init__(self, rows: TensorDataset, views: bool = False) -> None:
        inputs, self.labels = rows.tensors
        self.inputs = inputs if views else [each.clone() for each in inputs]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row], {"label": self.labels[row].clone()}


def as_lists(rows: Any) -> Any:
    """The collate function that torchvision uses for detection."""
    return tuple(zip(*rows, strict=True))


class Detector(nn.Module):
    """A model that takes lists and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, images: Any, targets: Any) -> torch.Tensor:
        labels = torch.stack([each["label"] for each in targets])
        return F.cross_entropy(self.net(torch.stack(images)), labels)


def detect(model: Any, batches: Iterable[Any], optimizer: Any) -> None:
    for images, targets in batches:
        update(optimizer, model(list(images), list(targets)))


def learn(given: Given, data: Any, ahead: bool = False) -> Weights:
    split = given.split()
    model, loader = split.wrap(Detector()), split.loader(data, seed=0, collate_fn=as_lists)
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        detect(model, early(loader) if ahead else loader, optimizer)
    return weights(model)


@exact
def kept_rows_in_lists(given: Given) -> Weights:
    return learn(given, Kept(given.rows))


@exact
def views_of_rows_in_lists(given: Given) -> Weights:
    return learn(given, Kept(given.rows, views=True))


@exact
def kept_rows_with_the_next_batch_early(given: Given) -> Weights:
    return learn(given, Kept(given.rows), ahead=True)


@exact
def kept_rows_over_the_ends_of_epochs(given: Given) -> Weights:
    """Fetches the first batch of an epoch before it computes the last one of the epoch before."""
    split = given.split()
    model, loader = (
        split.wrap(Detector()),
        split.loader(Kept(given.rows), seed=0, collate_fn=as_lists),
    )

    def endless() -> Iterator[Any]:
        for _ in range(EPOCHS):
            yield from loader

    detect(model, early(endless()), sgd(model))
    return weights(model)


@exact
def kept_rows_that_the_loop_stacks(given: Given) -> Weights:
    split = given.split()
    model, loader = (
        split.wrap(network()),
        split.loader(Kept(given.rows), seed=0, collate_fn=as_lists),
    )
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        for images, targets in loader:
            labels = torch.stack([each["label"] for each in targets])
            update(optimizer, F.cross_entropy(model(torch.stack(images)), labels))
    return weights(model)


@exact
def kept_rows_that_are_validated_between(given: Given) -> Weights:
    """Validates on the training rows too, which are the same objects."""
    split, data = given.split(), Kept(given.rows)
    model, loader = split.wrap(Detector()), split.loader(data, seed=0, collate_fn=as_lists)
    held_out = split.loader(data, shuffle=False, training=False, collate_fn=as_lists)
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        detect(model, loader, optimizer)
        with torch.no_grad():
            for images, targets in held_out:
                model(list(images), list(targets))
    return weights(model)


@exact
def kept_rows_beside_another_loader(given: Given) -> Weights:
    """Loops over two loaders at once: labelled rows and other rows of the same data set."""
    split, data = given.split(), Kept(given.rows)
    model = split.wrap(Detector())
    loaders = [split.loader(data, seed=seed, collate_fn=as_lists) for seed in (0, 1)]
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        for batches in zip(*loaders, strict=True):
            for images, targets in batches:
                update(optimizer, model(list(images), list(targets)))
    return weights(model)
