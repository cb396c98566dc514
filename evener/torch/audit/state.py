"""Save and restore attributes of modules that an audit's passes change."""

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
    """Saved content of a list, dict or deque, with which it can be restored later."""

    keys: list[Any] | None  # the keys of a dict; None for others
    items: list[Any]
    ids: list[int]  # the ids of the items
    inner: list[tuple[Any, Any]]  # items that can change in place, with the data to restore them
    # items that were empty containers, which are common and faster to restore
    empty: list[Any]


@contextmanager
def kept_attributes(*holders: Any, apart: Iterable[Any] = ()) -> Iterator[None]:
    """Context manager that restores attributes and frozen weights of `holders` on exit.

    Objects in `apart` are left out.
    """
    restore = keep_with_frozen(*holders, apart=apart)
    try:
        yield
    finally:
        restore()


def keep_with_frozen(*holders: Any, apart: Iterable[Any] = ()) -> Callable[[], None]:
    """Save attributes and frozen parameters, and return a function that restores them.

    Objects in `apart` are left out. The function may be called several times.
    """
    # Attributes, such as counters, lists, buffers and metrics, are restored in place. A model may
    # update frozen parameters itself, for example with a momentum encoder. They are saved unless
    # they are most of the weights.
    restore_attributes = keep_attributes(*holders, apart=apart)
    frozen = _copy_frozen(holders)

    def restore() -> None:
        restore_attributes()
        for each, was in frozen:
            restore_value(each, was)

    return restore


def _copy_frozen(holders: Iterable[Any]) -> list[Any]:
    """Return the frozen parameters with copies; [] if they are more than half of the weights."""
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
    """Save attributes of objects, and return a function that restores them.

    Objects in `apart` are left out, and so are parameters.
    """
    memo: dict[int, Any] = {id(each): None for each in apart}  # ids of objects to skip
    for each in holders:
        # FSDP replaces parameters
        memo |= {id(vars(each).get(name)): None for name in ("_parameters", "_modules")}
    kept = [(vars(each), copy_data(vars(each), memo)) for each in holders]

    def restore() -> None:
        for holder, was in kept:
            restore_value(holder, was)

    return restore


@contextmanager
def kept_state(holders: Iterable[Any] = (), apart: Iterable[Any] = ()) -> Iterator[None]:
    """Context manager that restores random generators and the attributes of `holders`.

    Modules include their submodules. Objects in `apart` are left out.
    """
    modules = [
        part
        for holder in holders
        for part in (holder.modules() if isinstance(holder, torch.nn.Module) else [holder])
    ]
    numbers = RandomState()
    try:
        with kept_attributes(*modules, apart=apart):
            yield
    finally:
        numbers.restore()


def copy_data(value: Any, memo: dict[int, Any], most_bytes: float = math.inf) -> Any:
    """Return a copy from which `restore_value` restores data; None if the data can't change.

    `memo` has the ids of objects to skip.
    """
    # Numbers and tensors of more than `most_bytes` aren't copied, for example. Skipped objects are
    # already copied or mustn't be copied.
    if type(value) in _PLAIN or id(value) in memo:
        return None
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, memo, most_bytes)
    if not isinstance(value, _CONTAINERS) or len(value) > MOST_ITEMS:
        return None
    memo[id(value)] = value
    if not value:
        return _EMPTY
    if isinstance(value, set):
        return set(value)
    return _copy_items(value, memo, most_bytes)


def _copy_items(value: Any, memo: dict[int, Any], most_bytes: float) -> _Items:
    keys = list(value) if isinstance(value, dict) else None
    items = list(value) if keys is None else list(value.values())
    inner, empty = [], []
    for item in items:
        if type(item) in _PLAIN:
            continue
        was = copy_data(item, memo, most_bytes)
        if was is _EMPTY:
            empty.append(item)
        elif was is not None:
            inner.append((item, was))
    return _Items(keys, items, list(map(id, items)), inner, empty)


def _copy_tensor(value: torch.Tensor, memo: dict[int, Any], most_bytes: float) -> Any:
    """Return a tensor's version counter and copy, or None if it isn't copied."""
    # not copied: a parameter, one that requires a gradient, was made in inference mode, has more
    # than `most_bytes`, or has no memory, such as weights that FSDP1 has freed
    if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_inference():
        return None
    if value.numel() and address(value) == 0:
        return None
    if value.nbytes > most_bytes:
        return None
    memo[id(value)] = value
    return value._version, value.detach().clone()


def restore_value(value: Any, was: Any) -> None:
    """Restore a value in place from its copy by `copy_data`; nothing happens if that is None."""
    if was is None:
        return
    if was is _EMPTY:
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
    for item in was.empty:
        if item:
            item.clear()
    for item, inner in was.inner:
        restore_value(item, inner)
    if isinstance(value, dict):
        if list(map(id, value.values())) != was.ids or list(value) != was.keys:
            value.clear()
            value.update(zip(was.keys or (), was.items, strict=True))
    elif list(map(id, value)) != was.ids:
        value.clear()
        value.extend(was.items)
