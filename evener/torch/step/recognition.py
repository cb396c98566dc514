"""Which batch a forward pass computes, in a loop that calls `backward` itself.

Such a loop tells nobody which batch it computes. It may take its next batch early, or draw from two
loaders, and what it gives to its model may be views of what a loader gave. So a batch is recognized
by the addresses of its tensors. A loop that uses `split.step` or `split.parts` says which batch it
computes, and is never looked at in this way (batches.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rows.structure import address, tensors_in
from .batches import TakenBatch


def match_addresses(inputs: Any, batches: Sequence[TakenBatch]) -> list[TakenBatch]:
    """The batches that have most of a forward pass's inputs in their memory; none where no input is
    of a batch.
    """
    tensors = tensors_in(inputs)
    counts = [_count_among(tensors, batch) for batch in batches]
    most = max(counts, default=(0, 0))
    if not most[0]:
        return []
    return [batch for batch, count in zip(batches, counts, strict=True) if count == most]


def _count_among(inputs: Sequence[torch.Tensor], batch: TakenBatch) -> tuple[int, int]:
    """How many of these tensors share their memory with one of the batch, and of them those that
    begin where it does.

    Rows that a data set keeps are in a batch of each epoch, so one of them alone doesn't tell.
    """
    alive = batch.alive()
    memory = {address(tensor) for tensor in alive} - {0}
    places = {_place(tensor) for tensor in alive}
    shared = [tensor for tensor in inputs if address(tensor) in memory]
    return len(shared), sum(_place(tensor) in places for tensor in shared)


def _place(tensor: torch.Tensor) -> Any:
    """Where a tensor's first element lies; its id where it has no storage (a sparse one)."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(tensor)
