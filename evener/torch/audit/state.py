"""Save and restore what an audit's passes may change: attributes, buffers and frozen weights."""

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

# maximum length of inspected lists and dicts; longer ones are data, not counters
MOST_ITEMS = 10_000
_CONTAINERS = (dict, list, deque, set)
_PLAIN = {bool, int, float, str, type(None)}
_EMPTY = ()  # restores a container that was empty


class _Items(msgspec.Struct, frozen=True, eq=False):
    """Saved content of a list, dict or deque, to restore it later."""

    keys: list[Any] | None  # the keys of a dict; None for others
    items: list[Any]
    ids: list[int]  # the ids of the items
    inner: list[tuple[Any, Any]]  # items that can change in place, with the data to restore them
    # items that were empty containers, which are common and faster to restore
    empty: list[Any]


@contextmanager
def kept_attributes(*holders: Any, excluded: Iterable[Any] = ()) -> Iterator[None]:
    """Context manager that restores attributes and frozen weights of `holders` on exit.

    Objects in `excluded` aren't restored.
    """
    restore = keep_with_frozen(*holders, excluded=excluded)
    try:
        yield
    finally:
        restore()


def keep_with_frozen(*holders: Any, excluded: Iterable[Any] = ()) -> Callable[[], None]:
    """Save attributes and frozen weights of objects, and return a function that restores them.

    Objects in `excluded` aren't saved. The function can be called several times.
    """
    # A model may update frozen parameters itself, for example in a momentum encoder. Attributes
    # such as counters, lists, buffers and metrics are restored in place.
    restore_attributes = keep_attributes(*holders, excluded=excluded)
    frozen = _copy_frozen(holders)

    def restore() -> None:
        restore_attributes()
        for each, was in frozen:
            restore_value(each, was)

    return restore


def _copy_frozen(holders: Iterable[Any]) -> list[Any]:
    """Return each frozen parameter with its version counter and a copy.

    The result is [] if frozen parameters are more than half of the weights.
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


def keep_attributes(*holders: Any, excluded: Iterable[Any] = ()) -> Callable[[], None]:
    """Save attributes of objects, and return a function that restores them.

    Parameters and the objects in `excluded` aren't saved.
    """
    memo: dict[int, Any] = {id(each): None for each in excluded}  # ids of objects to skip
    for each in holders:
        # FSDP replaces parameters
        memo |= {id(vars(each).get(name)): None for name in ("_parameters", "_modules")}
    kept = [(vars(each), copy_data(vars(each), memo)) for each in holders]

    def restore() -> None:
        for holder, was in kept:
            restore_value(holder, was)

    return restore


@contextmanager
def kept_state(holders: Iterable[Any] = (), excluded: Iterable[Any] = ()) -> Iterator[None]:
    """Context manager that restores the random generators and the attributes of `holders` on exit.

    The submodules of modules are restored, too. Objects in `excluded` aren't restored.
    """
    modules = [
        part
        for holder in holders
        for part in (holder.modules() if isinstance(holder, torch.nn.Module) else [holder])
    ]
    numbers = RandomState()
    try:
        with kept_attributes(*modules, excluded=excluded):
            yield
    finally:
        numbers.restore()


def copy_data(value: Any, memo: dict[int, Any], max_bytes: float = math.inf) -> Any:
    """Return a copy of a value that `restore_value` can use to restore the value in place.

    The result is None if the value isn't copied: for a number, a tensor of more than `max_bytes`
    bytes, or an object whose id is in `memo`. Each copied object is added to `memo`, by id.
    """
    if type(value) in _PLAIN or id(value) in memo:
        return None
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, memo, max_bytes)
    if not isinstance(value, _CONTAINERS) or len(value) > MOST_ITEMS:
        return None
    memo[id(value)] = value
    if not value:
        return _EMPTY
    if isinstance(value, set):
        return set(value)
    return _copy_items(value, memo, max_bytes)


def _copy_items(value: Any, memo: dict[int, Any], max_bytes: float) -> _Items:
    keys = list(value) if isinstance(value, dict) else None
    items = list(value) if keys is None else list(value.values())
    inner, empty = [], []
    for item in items:
        if type(item) in _PLAIN:
            continue
        was = copy_data(item, memo, max_bytes)
        if was is _EMPTY:
            empty.append(item)
        elif was is not None:
            inner.append((item, was))
    return _Items(keys, items, list(map(id, items)), inner, empty)


def _copy_tensor(value: torch.Tensor, memo: dict[int, Any], max_bytes: float) -> Any:
    """Return a tensor's version counter and a copy, or None for a tensor that isn't copied.

    These aren't copied: parameters, tensors that require a gradient, tensors made in inference
    mode, tensors of more than `max_bytes` bytes, and tensors without memory, such as weights that
    FSDP1 has freed. Each copied tensor is added to `memo`, by id.
    """
    if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_inference():
        return None
    if value.numel() and address(value) == 0:
        return None
    if value.nbytes > max_bytes:
        return None
    memo[id(value)] = value
    return value._version, value.detach().clone()


def restore_value(value: Any, saved: Any) -> None:
    """Restore a value in place from a copy that `copy_data` returned.

    Nothing happens if the copy is None.
    """
    if saved is None:
        return
    if saved is _EMPTY:
        value.clear()
    elif isinstance(value, torch.Tensor):
        version, copied = saved
        with torch.no_grad():  # a tensor changed through .data alone still has its version
            (value.data if value._version == version else value).copy_(copied)
    elif isinstance(value, set):
        value.clear()
        value.update(saved)
    else:
        _put_back_items(value, saved)


def _put_back_items(value: Any, saved: _Items) -> None:
    for item in saved.empty:
        if item:
            item.clear()
    for item, inner in saved.inner:
        restore_value(item, inner)
    if isinstance(value, dict):
        if list(map(id, value.values())) != saved.ids or list(value) != saved.keys:
            value.clear()
            value.update(zip(saved.keys or (), saved.items, strict=True))
    elif list(map(id, value)) != saved.ids:
        value.clear()
        value.extend(saved.items)
