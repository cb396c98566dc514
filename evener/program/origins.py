"""The way of what ranks have exchanged through a program: into its loss, its weights and its rates,
or only into what it prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

_READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.numpy}
_IN_PLACE = ("add", "sub", "mul", "div", "truediv", "pow")
_FORGET = 1000  # marks of storages, after which those that are gone are looked for


class Origins:
    """Knows which tensors were made of what ranks have exchanged, and by which call.

    A tensor is known by itself if a function made it of such data, and by its storage if such data
    were written into it. The second says nothing of what was computed from it before.
    """

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self._written: dict[int, tuple[StorageWeakRef, str]] = {}
        self.seen = False  # something was exchanged
        self.read = ""  # the call of which the program has read a number

    def write(self, data: Any, place: str) -> None:
        """Note that what was exchanged at `place` has been written into these tensors."""
        self.seen = True
        for tensor in each_tensor_in(data):
            storage = _storage(tensor)
            if storage is not None:
                self._written[storage._cdata] = (StorageWeakRef(storage), place)
        if len(self._written) > _FORGET:
            kept = {key: each for key, each in self._written.items() if not each[0].expired()}
            self._written = kept

    def write_objects(self, data: Any, place: str) -> None:
        """Note that these objects were exchanged; numbers among them are read thereby."""
        self.write(data, place)
        if any(isinstance(each, int | float) for each in leaves_of(data)):
            self.read = place

    def find(self, data: Any) -> str:
        """The place where something in nested data was exchanged; empty if nothing was."""
        for each in leaves_of(data):
            place = self._find_tensor(each) if isinstance(each, torch.Tensor) else ""
            if place:
                return place
        return ""

    def find_made(self, tensor: torch.Tensor) -> str:
        """The place where something was exchanged that this tensor was computed of."""
        return str(self._made.get(tensor, ""))

    def follow(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Note what a function has made of what was exchanged."""
        place = self.find((arguments, keywords)) if self.seen else ""
        if not place:
            return
        if function in _READS:
            self.read = place
        for tensor in each_tensor_in(result):
            self._made[tensor] = place
        if _is_in_place(function) and arguments:
            self.write(arguments[0], place)
            for tensor in each_tensor_in(arguments[0]):
                self._made[tensor] = place
        if "out" in keywords:
            self.write(keywords["out"], place)

    def _find_tensor(self, tensor: torch.Tensor) -> str:
        if tensor in self._made:
            return str(self._made[tensor])
        storage = _storage(tensor)
        if storage is None or storage._cdata not in self._written:
            return ""
        reference, place = self._written[storage._cdata]
        return "" if reference.expired() else place


def each_tensor_in(data: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested data, also in the fields of a dataclass, as models' outputs are."""
    return (each for each in leaves_of(data) if isinstance(each, torch.Tensor))


def leaves_of(data: Any) -> Iterator[Any]:
    """All that lies in nested tuples, lists, sets, dicts, slices and dataclasses."""
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


def _is_in_place(function: Any) -> bool:
    """True for a function that writes into its first argument, such as mul_ and +=."""
    name = str(getattr(function, "__name__", ""))
    if name in ("__setitem__", "__set__"):
        return True
    if name.startswith("__"):
        return name[2:3] == "i" and name[3:-2] in _IN_PLACE
    return name.endswith("_")


def _storage(tensor: torch.Tensor) -> Any:
    """The storage of a tensor; None for one without (a sparse one, say)."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
