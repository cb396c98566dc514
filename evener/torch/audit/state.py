"""What computing a loss changes beside gradients, put back afterwards.

Attributes, buffers, counters, metrics, random numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .randomness import RandomState

MOST_ITEMS = 10_000  # of a list or dict that is looked into; longer ones are data, not counters
_CONTAINERS = (dict, list, deque, set)


@contextmanager
def kept_attributes(*holders: Any, apart: Iterable[Any] = ()) -> Iterator[None]:
    """Put back what all holders have, in place, when the block ends: counters, lists of figures,
    buffers, metrics. What they have `apart` isn't looked into.

    Parameters aren't copied, but for those that a model moves itself, as a momentum encoder's.
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
    """Weights that nothing trains, and what puts each back; none where they are more than those
    that are trained.
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
    """Note what all holders have, but for what `apart` refers to; the function that puts it back,
    in place.
    """
    memo: dict[int, Any] = {id(each): None for each in apart}  # what needn't be looked into
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
    """Put back the attributes of all holders and of their modules, but for what they have `apart`,
    and the random state, when the block ends.
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
    """The data that put a value back in place; None for a value that is only referred to.

    Tensors of more than `most_bytes` aren't copied.
    """
    if id(value) in memo:
        return None
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, memo, most_bytes)
    if not isinstance(value, _CONTAINERS) or len(value) > MOST_ITEMS:
        return None
    memo[id(value)] = value
    if not value:  # as most of a module's are
        return ()
    if isinstance(value, set):
        return set(value)
    return [(key, item, copy_data(item, memo, most_bytes)) for key, item in _list_items(value)]


def _copy_tensor(value: torch.Tensor, memo: dict[int, Any], most_bytes: float) -> Any:
    """A tensor's version and a copy of it; None for one that is trained, or is too large."""
    if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_inference():
        return None
    if value.nbytes > most_bytes:
        return None
    memo[id(value)] = value
    return value._version, value.detach().clone()


def _list_items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def put_back(value: Any, was: Any) -> None:
    """Put back what `copy_data` has noted of a value."""
    if was is None or (was == () and not value):
        return
    if isinstance(value, torch.Tensor):
        version, copied = was
        with torch.no_grad():  # one that was changed by its data alone has its version still
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
