"""Save what computing a loss changes beside gradients, and restore it afterwards.

That is attributes, buffers, counters, metrics and random numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .randomness import RandomState

MOST_ITEMS = 10_000  # of a list or dict that is inspected; longer ones are data, not counters
_CONTAINERS = (dict, list, deque, set)


@contextmanager
def kept_attributes(*holders: Any, apart: Iterable[Any] = ()) -> Iterator[None]:
    """Enter a context that restores the attributes of all holders, in place, at its end.

    Examples are counters, lists of values, buffers and metrics. Objects in `apart` are left out.
    Parameters aren't copied, except those that a model moves itself, such as a momentum encoder's.
    """
    restore = keep_attributes(*holders, apart=apart)
    frozen = _copy_frozen(holders)
    try:
        yield
    finally:
        restore()
        for each, was in frozen:
            put_back(each, was)


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
    if id(value) in memo:
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
    return [(key, item, copy_data(item, memo, most_bytes)) for key, item in _list_items(value)]


def _copy_tensor(value: torch.Tensor, memo: dict[int, Any], most_bytes: float) -> Any:
    """Return a tensor's version and a copy, or None if the tensor is trained or too large."""
    if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_inference():
        return None
    if value.nbytes > most_bytes:
        return None
    memo[id(value)] = value
    return value._version, value.detach().clone()


def _list_items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def put_back(value: Any, was: Any) -> None:
    """Restore a value from what `copy_data` returned for it."""
    if was is None or (was == () and not value):
        return
    if isinstance(value, torch.Tensor):
        version, copied = was
        with torch.no_grad():  # a tensor changed through .data alone still has its version
            (value.data if value._version == version else value).copy_(copied)
    elif isinstance(value, set):
        value.clear()
        value.update(was)
    else:
        _put_back_items(value, was)


def _put_back_items(value: Any, was: Any) -> None:
    for _, item, inner in was:
        put_back(item, inner)
    if [(key, id(item)) for key, item in _list_items(value)] == [
        (key, id(item)) for key, item, _ in was
    ]:
        return
    value.clear()
    if isinstance(value, dict):
        value.update({key: item for key, item, _ in was})
    else:
        value.extend(item for _, item, _ in was)
