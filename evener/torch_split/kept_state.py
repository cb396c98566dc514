"""The state of modules and trainers, put back after a loss was computed, so that a check leaves no trace."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

MOST_ITEMS = 10_000  # of a list or dict that is looked into; longer ones are data, not counters
_CONTAINERS = (dict, list, deque, set)


@contextmanager
def kept_attributes(*holders: Any) -> Iterator[None]:
    """Put back what all holders have, in place, when the block ends: counters, lists of figures, buffers, metrics.

    Parameters aren't copied.
    """
    put_back = keep_attributes(*holders)
    try:
        yield
    finally:
        put_back()


def keep_attributes(*holders: Any, apart: Iterable[Any] = ()) -> Callable[[], None]:
    """Note what all holders have, but for what `apart` refers to; the function that puts it back, in place."""
    memo: dict[int, Any] = {id(each): None for each in apart}  # what needn't be looked into
    for each in holders:
        memo |= {id(vars(each).get(name)): None for name in ("_parameters", "_modules")}  # FSDP exchanges parameters
    kept = [(vars(each), _copy(vars(each), memo)) for each in holders]

    def put_back() -> None:
        for holder, was in kept:
            _put_back(holder, was)

    return put_back


@contextmanager
def kept_state(holders: Iterable[Any] = ()) -> Iterator[None]:
    """Put back the attributes of all holders and of their modules, and the random state, when the block ends."""
    modules = [part for each in holders for part in (each.modules() if isinstance(each, torch.nn.Module) else [each])]
    numbers, more = random.getstate(), numpy.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus), kept_attributes(*modules):
            yield
    finally:
        random.setstate(numbers)
        numpy.random.set_state(more)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's random numbers."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """The data that put a value back in place; None for a value that is only referred to."""
    if id(value) in memo:
        return None
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_inference():
            return None
        memo[id(value)] = value
        return value._version, value.detach().clone()
    if (type(value) not in _CONTAINERS and not isinstance(value, _CONTAINERS)) or len(value) > MOST_ITEMS:
        return None
    memo[id(value)] = value
    if isinstance(value, set):
        return set(value)
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [(key, item, _copy(item, memo)) for key, item in items]


def _put_back(value: Any, was: Any) -> None:
    if was is None:
        return
    if isinstance(value, torch.Tensor):
        version, copied = was
        if value._version != version:
            with torch.no_grad():
                value.copy_(copied)
        return
    if isinstance(value, set):
        value.clear()
        value.update(was)
        return
    for _, item, inner in was:
        _put_back(item, inner)
    same = list(value.items() if isinstance(value, dict) else enumerate(value))
    if [(key, id(item)) for key, item in same] != [(key, id(item)) for key, item, _ in was]:
        value.clear()
        if isinstance(value, dict):
            value.update({key: item for key, item, _ in was})
        else:
            value.extend(item for _, item, _ in was)
