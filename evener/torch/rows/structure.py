"""Find the tensors in a batch, cut out rows, and hold rows assigned by length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import Any, NoReturn

import torch

from ...errors import RequestError


class AssignedBatch:
    """A rank's batch in passes, with rows assigned by length.

    Using it like a normal batch raises RequestError.
    """

    # Each pass is collated separately.

    def __init__(self, passes: Sequence[Any], rows: Sequence[int]) -> None:
        self.passes = passes  # the data of each pass
        self.rows = rows  # number of rows of each pass

    def map(self, function: Callable[[Any], Any]) -> AssignedBatch:
        """Return the batch with `function` applied to the data of each pass."""
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
    """Return the address of a tensor's storage, which identifies the storage.

    A sparse tensor has none; its id is returned.
    """
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def each_tensor(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply `function` to every tensor in nested tuples, lists and mappings.

    Return the same structure, with other values unchanged.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    return each_item(lambda item: each_tensor(function, item), data)


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists, mappings and AssignedBatches, in order."""
    found: list[torch.Tensor] = []
    _add_tensors(data, found)
    return found


def _add_tensors(data: Any, tensors: list[torch.Tensor]) -> None:
    """Append the tensors in nested `data` to `tensors`."""
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
    """Apply `function` to each item of a tuple, list, mapping or AssignedBatch.

    Return the same structure. Anything else is returned unchanged.
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
    """Return rows `start` to `stop` - 1 of a batch, in the same structure.

    `rows` is the batch's number of rows. Scalars are returned whole. Raises RequestError for data
    that can't be cut.
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
    """Return rows `start` to `stop` - 1 of a tensor or array."""
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
    """True for a list or tuple with one plain item per row."""
    # Texts are plain items, for example.
    if not isinstance(data, (list, tuple)) or not data or len(data) != rows:
        return False
    nested = (list, tuple, MutableMapping)
    return not any(hasattr(each, "shape") or isinstance(each, nested) for each in data)
