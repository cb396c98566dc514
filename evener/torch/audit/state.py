"""Save what computing a loss changes beside gradients, and restore it afterwards.

That is attributes, buffers, counters, metrics and random numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from ..rows.structure import address
from .randomness import RandomState

MOST_ITEMS = 10_000  # of a list or dict that is inspected; longer ones are data, not counters
_CONTAINERS = (dict, list, deque, set)
_PLAIN = {bool, int, float, str, type(None)}


class _Items(msgspec.Struct, frozen=True, eq=False):
    """What restores a dict, list or deque: its keys (of a dict), items and their ids.

    `inner` are the items that may themselves be changed, with what restores them.
    """

    keys: list[Any] | None
    items: list[Any]
    ids: list[int]
    inner: list[tuple[Any, Any]]


@contextmanager
def kept_attributes(*holders: Any, apart: Iterable[Any] = ()) -> Iterator[None]:
    """Enter a context that restores what `keep_with_frozen` saves at its end."""
    restore = keep_with_frozen(*holders, apart=apart)
    try:
        yield
    finally:
        restore()


def keep_with_frozen(*holders: Any, apart: Iterable[Any] = ()) -> Callable[[], None]:
    """Save the attributes of all holders; return the function that restores them in place.

    Examples are counters, lists of values, buffers and metrics. Objects in `apart` are left out.
    Parameters aren't copied, except those that a model moves itself, such as a momentum encoder's.
    The function may be called several times.
    """
    restore_attributes = keep_attributes(*holders, apart=apart)
    frozen = _copy_frozen(holders)

    def restore() -> None:
        restore_attributes()
        for each, was in frozen:
            put_back(each, was)

    return restore


def _copy_frozen(holders: Iterable[Any]) -> list[Any]:
    """Return the frozen weights, each with the data that restore it.

    Return none if they outnumber the trained weights.
    """
    every = [
        each
        for holder in holders
        for each in vars(holder).get("_parameters", {}).values()
        if each is not None
    ]
    frozen = [each for each in every if not each.requires_grad]
    few = 2 * sum(map(torch.numel, frozen)) <= sum(map(torch.numel, every))
    return [(each, (each._version, each.detach().clone())) for each in frozen if few]


def keep_attributes(*holders: Any, apart: Iterable[Any] = ()) -> Callable[[], None]:
    """Save the attributes of all holders; return the function that restores them in place.

    Objects in `apart` are left out.
    """
    memo: dict[int, Any] = {id(each): None for each in apart}  # what isn't inspected
    for each in holders:
        memo |= {
            id(vars(each).get(name)): None for name in ("_parameters", "_modules")
        }  # FSDP exchanges parameters
    kept = [(vars(each), copy_data(vars(each), memo)) for each in holders]

    def restore() -> None:
        for holder, was in kept:
            put_back(holder, was)

    return restore


@contextmanager
def kept_state(holders: Iterable[Any] = (), apart: Iterable[Any] = ()) -> Iterator[None]:
    """Enter a context that restores the attributes of holders, and the random state, at its end.

    A holder that is a module includes its inner modules. Objects in `apart` are left out.
    """
    modules = [
        part
        for each in holders
        for part in (each.modules() if isinstance(each, torch.nn.Module) else [each])
    ]
    numbers = RandomState()
    try:
        with kept_attributes(*modules, apart=apart):
            yield
    finally:
        numbers.restore()


def copy_data(value: Any, memo: dict[int, Any], most_bytes: float = math.inf) -> Any:
    """Return the data that restore a value in place, or None for a value that is only referenced.

    Tensors of more than `most_bytes` aren't copied.
    """
    if type(value) in _PLAIN or id(value) in memo:
        return None
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, memo, most_bytes)
    if not isinstance(value, _CONTAINERS) or len(value) > MOST_ITEMS:
        return None
    memo[id(value)] = value
    if not value:  # like most containers of a module
        return ()
    if isinstance(value, set):
        return set(value)
    return _copy_items(value, memo, most_bytes)


def _copy_items(value: Any, memo: dict[int, Any], most_bytes: float) -> _Items:
    keys = list(value) if isinstance(value, dict) else None
    items = list(value) if keys is None else list(value.values())
    copies = [(item, copy_data(item, memo, most_bytes)) for item in items]
    inner = [(item, was) for item, was in copies if was is not None]
    return _Items(keys, items, list(map(id, items)), inner)


def _copy_tensor(value: torch.Tensor, memo: dict[int, Any], most_bytes: float) -> Any:
    """Return a tensor's version and a copy, or None if the tensor is trained or too large.

    Also None if its memory was freed, as FSDP1 does with weights that it has gathered.
    """
    if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_inference():
        return None
    if value.numel() and address(value) == 0:
        return None
    if value.nbytes > most_bytes:
        return None
    memo[id(value)] = value
    return value._version, value.detach().clone()


def put_back(value: Any, was: Any) -> None:
    """Restore a value from what `copy_data` returned for it."""
    if was is None:
        return
    if was == ():
        if value:
            value.clear()
    elif isinstance(value, torch.Tensor):
        version, copied = was
        with torch.no_grad():  # a tensor changed through .data alone still has its version
            (value.data if value._version == version else value).copy_(copied)
    elif isinstance(value, set):
        value.clear()
        value.update(was)
    else:
        _put_back_items(value, was)


def _put_back_items(value: Any, was: _Items) -> None:
    for item, inner in was.inner:
        put_back(item, inner)
    if isinstance(value, dict):
        if list(map(id, value.values())) != was.ids or list(value) != was.keys:
            value.clear()
            value.update(zip(was.keys or (), was.items, strict=True))
    elif list(map(id, value)) != was.ids:
        value.clear()
        value.extend(was.items)
