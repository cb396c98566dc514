"""Marks tensors with the collective that their values come from, to track them through a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.numpy}
_IN_PLACE = ("add", "sub", "mul", "div", "truediv", "pow")
_FORGET = 1000  # expired storages are dropped once there are this many


class TensorMarks:
    """Marks tensors with the collective that their values come from.

    A mark is a string such as "all_reduce (train.py:12)". It belongs to one tensor object, or to a
    storage and thus to all its views.
    """

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self._written: dict[StorageWeakRef, str] = {}

    def mark(self, tensor: torch.Tensor, collective: str) -> None:
        """Mark this tensor object, but not its views."""
        self._made[tensor] = collective

    def mark_storage(self, tensor: torch.Tensor, collective: str) -> None:
        """Mark the tensor's storage, and thus all its views."""
        storage = find_storage(tensor)
        if storage is not None:
            self._written[StorageWeakRef(storage)] = collective
        if len(self._written) > _FORGET:
            self._written = {
                key: collective for key, collective in self._written.items() if not key.expired()
            }

    def find(self, tensor: torch.Tensor) -> str:
        """Return the tensor's own mark, or else the mark of its storage; "" if neither has one."""
        if tensor in self._made:
            return self.find_own_mark(tensor)
        storage = find_storage(tensor)
        # An address isn't reused while a weak reference to its storage exists.
        return "" if storage is None else self._written.get(StorageWeakRef(storage), "")

    def find_own_mark(self, tensor: torch.Tensor) -> str:
        """Return the mark of this tensor object, or "" if it has none.

        A mark of its storage doesn't count.
        """
        return str(self._made.get(tensor, ""))

    def remove(self, tensor: torch.Tensor) -> None:
        """Remove the marks of the tensor and of its storage."""
        self._made.pop(tensor, None)
        storage = find_storage(tensor)
        if storage is not None:
            self._written.pop(StorageWeakRef(storage), None)


def each_tensor_in(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside nested containers."""
    return (leaf for leaf in leaves_of(data) if isinstance(leaf, torch.Tensor))


def leaves_of(data: Any) -> Iterator[Any]:
    """Yield the values inside nested dicts, tuples, lists, sets, slices and dataclasses."""
    if isinstance(data, dict):
        inner: Iterable[Any] = data.values()
    elif isinstance(data, tuple | list | set):
        inner = data
    elif isinstance(data, slice):
        inner = (data.start, data.stop, data.step)
    elif hasattr(data, "__dataclass_fields__") and not isinstance(data, type):
        inner = [getattr(data, name) for name in data.__dataclass_fields__]
    else:
        yield data
        return
    for each in inner:
        yield from leaves_of(each)


def is_in_place(function: Any) -> bool:
    """Return whether the PyTorch function changes its first argument in place."""
    name = str(getattr(function, "__name__", ""))
    if name in ("__setitem__", "__set__"):
        return True
    if name.startswith("__"):
        return name[2:3] == "i" and name[3:-2] in _IN_PLACE
    return name.endswith("_")


def find_storage(tensor: torch.Tensor) -> Any:
    """Return the tensor's storage, or None for a tensor without one, such as a sparse tensor."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
