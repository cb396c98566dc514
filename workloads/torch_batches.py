"""Batches for a PyTorch workload: made once on the host, a fresh slice for each step, sent to the device on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from evener.errors import RequestError

SampleBatch = Callable[[int], Any]  # n -> (inputs, targets), tensors of n rows each, on the host
SPARE_ROWS = 4096  # at most so many more rows than a batch are held


class Batches:
    """Batches of one size, in turn. From the host each step, or from the device's own memory with `on_device`."""

    def __init__(self, sample_batch: SampleBatch, device: torch.device, on_device: bool) -> None:
        self._sample = sample_batch
        self._device = device
        self._on_device = on_device
        self._batches: list[Any] = []
        self._position = 0
        self.rows = 0

    def drop(self) -> None:
        """Let go of every batch."""
        self._batches = []
        self.rows = 0

    def make(self, rows: int) -> None:
        """Make batches of so many rows; RequestError if `sample_batch` gives something else."""
        spare = 0 if self._on_device else min(rows, SPARE_ROWS)
        pool = as_pair(self._sample(rows + spare))
        check_rows(pool, rows + spare)
        if self._on_device:
            pool = send(pool, self._device)
        elif self._device.type == "cuda":
            pool = each(lambda tensor: tensor.pin_memory(), pool)
        starts = sorted({0, spare // 4, spare // 2, spare})
        self._batches = [each(lambda tensor, at=start: tensor[at : at + rows], pool) for start in starts]
        self._position = 0
        self.rows = rows

    def take(self) -> Any:
        """The next batch, on the device."""
        batch = self._batches[self._position % len(self._batches)]
        self._position += 1
        return send(batch, self._device)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets); targets are None for a lone tensor or mapping."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, torch.Tensor | Mapping):
        return batch, None
    raise RequestError(
        f"sample_batch gives a {type(batch).__name__}, no pair.",
        "Return (inputs, targets), or the inputs alone for a module that returns its loss.",
    )


def check_rows(batch: Any, rows: int) -> None:
    """RequestError unless every tensor has so many rows."""
    tensors: list[Any] = []
    each(tensors.append, batch)
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if counts != {rows}:
        raise RequestError(
            f"sample_batch({rows}) gives tensors of {sorted(counts)} rows.", f"Each tensor needs {rows} rows."
        )


def send(batch: Any, device: torch.device) -> Any:
    """The batch on a device; from pinned memory the copy overlaps with what runs."""
    return each(lambda tensor: tensor.to(device, non_blocking=True), batch)


def each(function: Callable[..., Any], data: Any) -> Any:
    """`function` of every tensor in tuples, lists and mappings; numpy arrays become tensors."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: each(function, item) for key, item in data.items()}
    if isinstance(data, tuple | list):
        return tuple(each(function, item) for item in data)
    if hasattr(data, "__array__"):
        return function(torch.as_tensor(data))
    return data
