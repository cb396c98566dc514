"""Recognize which batch a model computes, by the memory addresses of its input tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rows.structure import address, tensors_in
from .batches import TakenBatch


def match_addresses(inputs: Any, batches: Sequence[TakenBatch]) -> list[TakenBatch]:
    """Return the batches that share memory with the most tensors among a model's inputs.

    The result is [] if no batch shares any.
    """
    tensors = tensors_in(inputs)
    counts = [_count_shared(tensors, batch) for batch in batches]
    most = max(counts, default=(0, 0))
    if not most[0]:
        return []
    return [batch for batch, count in zip(batches, counts, strict=True) if count == most]


def _count_shared(inputs: Sequence[torch.Tensor], batch: TakenBatch) -> tuple[int, int]:
    """Return how many inputs share storage with a batch, and how many start at the same address."""
    # Batches can be views of one tensor, such as a data set in memory. They share its storage, but
    # only the batch that the model computes begins at the inputs' addresses.
    alive = batch.alive()
    memory = {address(tensor) for tensor in alive} - {0}
    first_addresses = {_first_address(tensor) for tensor in alive}
    shared = [tensor for tensor in inputs if address(tensor) in memory]
    return len(shared), sum(_first_address(tensor) in first_addresses for tensor in shared)


def _first_address(tensor: torch.Tensor) -> Any:
    """Return the address of a tensor's first element, or its id if it has no storage."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        # it has no storage
        return id(tensor)
