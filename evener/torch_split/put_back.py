"""What modules keep beside parameters and buffers, put back after a pass that is to leave no trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KINDS = (bool, int, float, complex, str, type(None), list, dict, set, torch.Tensor)
_OWN = frozenset(vars(torch.nn.Module()))  # of every module: parameters, hooks, its mode


@contextmanager
def put_back(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Their counters, metrics, lists and dicts are as before once this ends; attributes that are new are gone."""
    everything = [vars(module) for module in modules]
    before = [
        {key: (value, _copy(value)) for key, value in each.items() if _is_kept(key, value)} for each in everything
    ]
    try:
        yield
    finally:
        for attributes, kept in zip(everything, before, strict=True):
            for key in [key for key, value in attributes.items() if _is_kept(key, value) and key not in kept]:
                del attributes[key]
            attributes.update({key: _restore(*pair) for key, pair in kept.items()})


def _is_kept(key: str, value: Any) -> bool:
    return key not in _OWN and type(value) in _KINDS


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _restore(value: Any, saved: Any) -> Any:
    """A list, dict or set stays the object that others may hold."""
    if isinstance(value, list):
        value[:] = saved
        return value
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(saved)
        return value
    return saved
