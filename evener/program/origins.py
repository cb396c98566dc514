"""Track what a program computes from values that its ranks exchange.

Uneven shares change exchanged values. The change matters if the values affect the program's loss,
weights or learning rates, but not if they are only printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

_READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.numpy}
_IN_PLACE = ("add", "sub", "mul", "div", "truediv", "pow")
_FORGET = 1000  # expired storages are dropped once there are this many


class Origins:
    """Tracks which tensors depend on exchanged values, and which collective exchanged them.

    A tensor that a function computed from exchanged values is tracked by identity. A tensor into
    which exchanged values were written is tracked by its storage, and so are all its views.
    Tensors computed from a storage before exchanged values were written into it aren't tracked.
    """

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self._written: dict[StorageWeakRef, str] = {}
        self.seen = False  # True once something was exchanged
        self.read = ""  # the call whose result the program read as a number
        self.reads = 0  # number of such reads

    def write(self, data: Any, place: str) -> None:
        """Record that values exchanged at `place` were written into the tensors in `data`.

        `place` names a collective and its line, such as "all_reduce (train.py:12)".
        """
        self.seen = True
        for tensor in each_tensor_in(data):
            storage = _storage(tensor)
            if storage is not None:
                self._written[StorageWeakRef(storage)] = place
        if len(self._written) > _FORGET:
            self._written = {
                key: place for key, place in self._written.items() if not key.expired()
            }

    def write_objects(self, data: Any, place: str) -> None:
        """Record that the objects in `data` were exchanged at `place` (see `write`).

        If the objects include Python numbers, the program counts as having read them, because what
        it does with a Python number can't be tracked.
        """
        self.write(data, place)
        if any(isinstance(each, int | float) for each in leaves_of(data)):
            self._note_read(place)

    def _note_read(self, place: str) -> None:
        self.read = place
        self.reads += 1

    def find(self, data: Any) -> str:
        """Return the place of the exchange that the first affected tensor in `data` depends on.

        `data` may be nested. The result is empty if none of its tensors depends on an exchange.
        """
        for each in leaves_of(data):
            place = self._find_tensor(each) if isinstance(each, torch.Tensor) else ""
            if place:
                return place
        return ""

    def find_made(self, tensor: torch.Tensor) -> str:
        """Return where the values from which a function computed this tensor were exchanged.

        The result is empty if the tensor wasn't computed from exchanged values. Values that were
        only written into its storage are ignored.
        """
        return str(self._made.get(tensor, ""))

    def follow(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Return the most serious difference between the ranks' records, a key of DIFFERENCES.

        The result is empty if the records agree.
        """
        place = self.find((arguments, keywords)) if self.seen else ""
        if not place:
            return
        if function in _READS:
            self._note_read(place)
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
        # An address isn't reused while a weak reference to its storage exists.
        return "" if storage is None else self._written.get(StorageWeakRef(storage), "")


def each_tensor_in(data: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested data, including fields of dataclasses such as model outputs."""
    return (each for each in leaves_of(data) if isinstance(each, torch.Tensor))


def leaves_of(data: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists, sets, dicts, slices and dataclasses."""
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
    """True if the function writes into its first argument, such as `mul_` or `+=`."""
    name = str(getattr(function, "__name__", ""))
    if name in ("__setitem__", "__set__"):
        return True
    if name.startswith("__"):
        return name[2:3] == "i" and name[3:-2] in _IN_PLACE
    return name.endswith("_")


def _storage(tensor: torch.Tensor) -> Any:
    """Return a tensor's storage; None if it has none, for example a sparse tensor."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
