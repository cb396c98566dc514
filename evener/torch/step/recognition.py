"""Recognize which batch a forward pass computes, in a loop that calls `backward` itself.

Such a loop may prefetch its next batch or use two loaders, and its model's inputs may be views of
the loader's tensors. So a batch is recognized by the addresses of its tensors. Loops with
`split.step` or `split.parts` need no recognition (batches.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rows.structure import address, tensors_in
from .batches import TakenBatch


def match_addresses(inputs: Any, batches: Sequence[TakenBatch]) -> list[TakenBatch]:
    """Return the batches that share memory with the most inputs of a forward pass.

    `inputs` are the model's nested arguments. Several batches may match equally well. Return [] if
    no input shares memory with a batch.
    """
    tensors = tensors_in(inputs)
    counts = [_count_among(tensors, batch) for batch in batches]
    most = max(counts, default=(0, 0))
    if not most[0]:
        return []
    return [batch for batch, count in zip(batches, counts, strict=True) if count == most]


def _count_among(inputs: Sequence[torch.Tensor], batch: TakenBatch) -> tuple[int, int]:
    """Count the inputs that share memory with a batch, in two ways."""
    # The second number counts inputs that begin at the address of one of the batch's tensors.
    # Batches can be views of one tensor, such as a data set in memory. They share its storage, but
    # only the batch that the model computes begins at the inputs' addresses.
    alive = batch.alive()
    memory = {address(tensor) for tensor in alive} - {0}
    places = {_place(tensor) for tensor in alive}
    shared = [tensor for tensor in inputs if address(tensor) in memory]
    return len(shared), sum(_place(tensor) in places for tensor in shared)


def _place(tensor: torch.Tensor) -> Any:
    """Return the address of a tensor's first element, or an id."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        # it has no storage
        return id(tensor)
