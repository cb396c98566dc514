"""Batches in nested tuples, lists and mappings: a function of each tensor, and rows of all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from numbers import Number
from typing import Any

import torch

from ..errors import RequestError
from .dealt_batch import DealtBatch


def each_tensor(function: Callable[[Any], Any], data: Any) -> Any:
    """`function` of every tensor in tuples, lists and mappings, which keep their types; all else as it is."""
    if isinstance(data, torch.Tensor):
        return function(data)
    return each_item(lambda item: each_tensor(function, item), data)


def cut_rows(data: Any, start: int, stop: int, rows: int) -> Any:
    """Rows `start` to `stop` of a batch of `rows`, in its own structure; numbers and tensors without rows stay.

    Tensors and arrays are cut, and lists with an item for each row, such as texts. RequestError for anything else.
    """
    if getattr(data, "shape", None) is not None:
        return _cut_tensor(data, start, stop, rows)
    if isinstance(data, (list, tuple)) and len(data) == rows and not any(map(_has_parts, data)):
        return data[start:stop]
    cut = each_item(lambda item: cut_rows(item, start, stop, rows), data)
    if cut is data and not isinstance(data, (str, Number, type(None))):
        raise RequestError(
            f"A {type(data).__name__} in the batch can't be cut into passes.",
            "Give tensors, or dicts, tuples and lists of them, each with a row for each sample.",
        )
    return cut


def _cut_tensor(tensor: Any, start: int, stop: int, rows: int) -> Any:
    if not tensor.shape:
        return tensor
    if len(tensor) != rows:
        raise RequestError(
            f"A tensor of shape {tuple(tensor.shape)} can't be cut into passes: the batch has {rows} rows.",
            "Let collate_fn give tensors whose first dimension is the rows.",
        )
    return tensor[start:stop]


def each_item(function: Callable[[Any], Any], data: Any) -> Any:
    """The tuple, list, mapping or DealtBatch with `function` of its items; anything else is returned itself."""
    if isinstance(data, DealtBatch):
        return data.map(function)
    if isinstance(data, MutableMapping):
        same = copy.copy(data)
        same.update({key: function(item) for key, item in data.items()})
        return same
    if isinstance(data, tuple) and not hasattr(data, "pin_memory"):  # a PackedSequence knows better
        items = [function(item) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if isinstance(data, list):
        return [function(item) for item in data]
    return data


def _has_parts(item: Any) -> bool:
    return hasattr(item, "shape") or isinstance(item, (list, tuple, MutableMapping))
