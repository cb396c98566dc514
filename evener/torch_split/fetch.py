"""The fetching of a batch's rows: at once by a tensor of row numbers if the data can, otherwise as DataLoader does.

Row by row, Python takes about 10 µs a row; a fast GPU is done with a small network's batch before it is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from .sampler import UnevenBatchSampler

Whole = Callable[[torch.Tensor, bool], Any]  # (row numbers, into pinned memory) -> the batch


def whole_fetch(dataset: Any) -> Whole | None:
    """The function by which `dataset` gives a whole batch for a tensor of row numbers; None if it has none.

    A TensorDataset has one, as do a Subset of it and a data set whose `__getitems__(self, rows: torch.Tensor)` says so
    by its annotation; it returns the batch as the loop gets it.
    """
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda rows, pinned: [select(each, rows, pinned) for each in tensors]
    if type(dataset) is Subset:
        inner = whole_fetch(dataset.dataset)
        numbers = torch.as_tensor(dataset.indices)
        numbers = torch.where(
            numbers < 0, numbers + len(dataset.dataset), numbers
        )  # from the end, as a Subset takes them
        return None if inner is None else lambda rows, pinned: inner(numbers[rows], pinned)
    if _takes_tensor(dataset):
        return lambda rows, _: dataset.__getitems__(rows)
    return None


def select(source: torch.Tensor, rows: torch.Tensor, pinned: bool = False) -> torch.Tensor:
    """`source[rows]`, in pinned host memory if asked and `source` is on the host."""
    if source.device.type != "cpu":
        return source.index_select(0, rows.to(source.device))
    if not pinned or source.requires_grad:
        return source.index_select(0, rows)
    out = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype, pin_memory=True)
    return torch.index_select(source, 0, rows, out=out)


class Fetch:
    """The batches of a sampler's steps, in its order; iterate anew for each pass. `options` are DataLoader's."""

    def __init__(self, dataset: Any, sampler: UnevenBatchSampler, options: Mapping[str, Any], pinned: bool) -> None:
        self._sampler = sampler
        self._pinned = pinned
        self._collate = options.get("collate_fn")
        whole = None if self._collate and not _takes_tensor(dataset) else whole_fetch(dataset)  # rows one by one
        self._whole = None if options.get("num_workers") else whole
        if self._whole is None:
            self._loader = _data_loader(dataset if whole is None else _ByList(dataset), sampler, options)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader) if self._whole is None else self._fetch(self._whole, self._sampler.batches())

    def _fetch(self, whole: Whole, batches: Iterator[torch.Tensor]) -> Iterator[Any]:
        for rows in batches:
            batch = whole(rows, self._pinned)
            yield batch if self._collate is None else self._collate(batch)


class _ByList(Dataset):  # type: ignore[misc]  # torch is not followed
    """Whole batches for DataLoader's worker processes, which are sent lists."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, rows: list[int]) -> Any:
        whole = whole_fetch(self._dataset)
        assert whole is not None
        return whole(torch.tensor(rows), False)


def _data_loader(dataset: Any, sampler: UnevenBatchSampler, options: Mapping[str, Any]) -> Any:
    if isinstance(dataset, _ByList):
        options = {**options, "collate_fn": options.get("collate_fn") or _as_it_is}
    return DataLoader(dataset, batch_sampler=sampler, **options)


def _as_it_is(batch: Any) -> Any:
    return batch


def _takes_tensor(dataset: Any) -> bool:
    method = getattr(type(dataset), "__getitems__", None)
    if method is None:
        return False
    try:
        hints = get_type_hints(method)
    except (NameError, TypeError, AttributeError):
        return False
    return any(kind is torch.Tensor for name, kind in hints.items() if name != "return")
