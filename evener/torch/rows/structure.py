"""The structure of a batch: its tensors, its rows cut from it, and the passes of one whose rows
were dealt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import Any, NoReturn

import torch

from ...errors import RequestError


class DealtBatch:
    """The passes of a rank, each collated by itself, with the rows of each that count.

    Every other use of it is refused in a sentence, as it is in a loop that computes a batch at
    once.
    """

    def __init__(self, passes: Sequence[Any], rows: Sequence[int]) -> None:
        self.passes = passes
        self.rows = rows

    def map(self, function: Callable[[Any], Any]) -> DealtBatch:
        """The batch with `function` applied to the data of each pass."""
        return DealtBatch(list(map(function, self.passes)), self.rows)

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
    """The address of a tensor's storage; the id of a tensor without one (a sparse one)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def each_tensor(function: Callable[[Any], Any], data: Any) -> Any:
    """`function` of every tensor in tuples, lists and mappings, which keep their types; all else as
    it is.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    return each_item(lambda item: each_tensor(function, item), data)


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings, and in the passes of a DealtBatch."""
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, tuple | list):
        return [
            tensor
            for item in data
            for tensor in ([item] if isinstance(item, torch.Tensor) else tensors_in(item))
        ]
    if isinstance(data, DealtBatch):
        return tensors_in(data.passes)
    return tensors_in(list(data.values())) if isinstance(data, Mapping) else []


def each_item(function: Callable[[Any], Any], data: Any) -> Any:
    """The tuple, list, mapping or DealtBatch with `function` of its items; anything else is
    returned itself.
    """
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


def cut_rows(data: Any, start: int, stop: int, rows: int) -> Any:
    """Rows `start` to `stop` of a batch of `rows`, in its own structure; numbers and tensors
    without rows stay.

    Tensors and arrays are cut, and lists with an item for each row, such as texts. RequestError for
    anything else.
    """
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
    """Some rows of a tensor or array; all of one without dimensions."""
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
    """True of a list or tuple whose items aren't batches themselves, such as texts."""
    if not isinstance(data, (list, tuple)) or not data or len(data) != rows:
        return False
    nested = (list, tuple, MutableMapping)
    return not any(hasattr(each, "shape") or isinstance(each, nested) for each in data)
