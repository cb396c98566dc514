"""Find, cut and transform the tensors in a batch of nested dicts, tuples and lists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import Any, NoReturn

import torch

from ...errors import RequestError


class AssignedBatch:
    """Batch of rows that were assigned by length, already divided into passes.

    Its items can be used only through `split.parts`; other access raises a RequestError.
    """

    # Each pass is collated separately.

    def __init__(self, passes: Sequence[Any], rows: Sequence[int]) -> None:
        self.passes = passes  # the data of each pass
        self.rows = rows  # number of rows of each pass

    def map(self, function: Callable[[Any], Any]) -> AssignedBatch:
        """Return a batch in which `function` is applied to the data of each pass."""
        return AssignedBatch(list(map(function, self.passes)), self.rows)

    def _refuse(self, *_: Any) -> NoReturn:
        raise RequestError(
            "The rows of this batch are assigned by length, in several passes on a rank, but "
            "this loop computes a"
            " batch at once.",
            "Write for part in split.parts(batch): and part.backward(loss).",
        )

    __iter__ = __getitem__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


def address(tensor: torch.Tensor) -> int:
    """Return the memory address of a tensor's storage, or the object's id if it has no storage."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def each_tensor(function: Callable[[Any], Any], data: Any) -> Any:
    """Return a copy of nested `data` with `function` applied to each tensor."""
    if isinstance(data, torch.Tensor):
        return function(data)
    return each_item(lambda item: each_tensor(function, item), data)


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Return all tensors in nested tuples, lists and mappings."""
    found: list[torch.Tensor] = []
    _add_tensors(data, found)
    return found


def _add_tensors(data: Any, tensors: list[torch.Tensor]) -> None:
    # fast, because models call it for each of their layers
    if isinstance(data, torch.Tensor):
        tensors.append(data)
    elif data is None or isinstance(data, (bool, int, float, str)):
        return
    elif isinstance(data, (tuple, list)):
        for item in data:
            _add_tensors(item, tensors)
    elif isinstance(data, AssignedBatch):
        _add_tensors(data.passes, tensors)
    elif isinstance(data, Mapping):
        for item in data.values():
            _add_tensors(item, tensors)


def each_item(function: Callable[[Any], Any], data: Any) -> Any:
    """Return a copy of a dict, list, tuple or AssignedBatch with `function` applied to each item.

    Any other object is returned unchanged.
    """
    if isinstance(data, AssignedBatch):
        return data.map(function)
    if isinstance(data, MutableMapping):
        same = copy.copy(data)
        same.update({key: function(item) for key, item in data.items()})
        return same
    # a PackedSequence has its own methods
    if isinstance(data, tuple) and not hasattr(data, "pin_memory"):
        items = [function(item) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if isinstance(data, list):
        return [function(item) for item in data]
    return data


def cut_rows(data: Any, start: int, stop: int, rows: int) -> Any:
    """Return rows `start` to `stop` - 1 of a batch with `rows` rows.

    Scalars aren't cut. Raises RequestError for data that can't be cut, or whose first dimension
    isn't `rows`.
    """
    # Tensors, arrays, and lists with one item per row, such as texts, can be cut. Numbers and
    # scalar tensors are scalars.
    shape = getattr(data, "shape", None)
    if shape is not None:
        return _cut_tensor(data, shape, start, stop, rows)
    if _has_an_item_for_each_row(data, rows):
        return data[start:stop]
    cut = each_item(lambda item: cut_rows(item, start, stop, rows), data)
    if cut is data and not isinstance(data, (str, Number, type(None))):
        raise RequestError(
            f"A {type(data).__name__} in the batch can't be cut into passes.",
            "Give tensors, or dicts, tuples and lists of them, each with a row for each sample.",
        )
    return cut


def _cut_tensor(data: Any, shape: Any, start: int, stop: int, rows: int) -> Any:
    if not shape:
        return data
    if len(data) != rows:
        raise RequestError(
            f"A tensor of shape {tuple(shape)} can't be cut into passes: the batch has "
            f"{rows} rows.",
            "Let collate_fn give tensors whose first dimension is the rows.",
        )
    return data[start:stop]


def _has_an_item_for_each_row(data: Any, rows: int) -> bool:
    """Return whether `data` is a list or tuple with one plain item, such as a string, per row."""
    if not isinstance(data, (list, tuple)) or not data or len(data) != rows:
        return False
    nested = (list, tuple, MutableMapping)
    return not any(hasattr(each, "shape") or isinstance(each, nested) for each in data)
