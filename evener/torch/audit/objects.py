"""Find and replace the tensors in batches that are a library's objects, such as graphs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_NO_BATCHES = (torch.Tensor, torch.nn.Module, type, FunctionType, MethodType, ModuleType)


def is_object(data: Any) -> bool:
    """True if `data` stores values in attributes and isn't a tensor, container or function."""
    containers = (tuple, list, Mapping)
    return hasattr(data, "__dict__") and not isinstance(data, (*_NO_BATCHES, *containers))


def unfold(data: Any) -> Any:
    """Replace each object in a batch by a dict of its tensor attributes.

    A batch without objects is returned unchanged.
    """
    return _unfold_nested(data, set()) if find_objects(data) else data


def _unfold_nested(data: Any, seen: set[int]) -> Any:
    """Return the tensors in `data`, in nested dicts and lists, or None."""
    # `seen` has the ids of the objects around `data`. Objects in `seen` are skipped, because
    # objects may refer to each other in a circle.
    if isinstance(data, torch.Tensor):
        return data
    if id(data) in seen:
        return None
    inner = seen | {id(data)}
    if is_object(data):
        data = vars(data)
    if isinstance(data, Mapping):
        values = {name: _unfold_nested(data[name], inner) for name in data}
        return {name: each for name, each in values.items() if each is not None} or None
    if isinstance(data, tuple | list):
        items = [_unfold_nested(each, inner) for each in data]
        return [item for item in items if item is not None] or None
    return None


def find_objects(data: Any) -> list[Any]:
    """Return the objects with tensors in nested tuples, lists and mappings.

    Objects inside such objects aren't listed.
    """
    if isinstance(data, Mapping):
        return [found for name in data for found in find_objects(data[name])]
    if isinstance(data, tuple | list):
        return [found for each in data for found in find_objects(each)]
    return [data] if is_object(data) and _unfold_nested(data, set()) else []


def remake(fresh: Any, recorded: Any, known: Mapping[int, Any]) -> Any:
    """Return the object to pass when a recorded call is repeated with other rows.

    It is a copy of `fresh`. Its tensors are replaced where `known` has one for the same attribute
    of `recorded`.

    - `fresh`: the object in the batch of other rows.
    - `recorded`: the object passed to the recorded call, of the same class.
    - `known`: replacements of recorded tensors, by the recorded tensor's id.
    """
    return _remake(fresh, recorded, known, set())


def _remake(fresh: Any, recorded: Any, known: Mapping[int, Any], seen: set[int]) -> Any:
    if isinstance(fresh, torch.Tensor):
        return known.get(id(recorded), fresh)
    if type(fresh) is not type(recorded) or id(fresh) in seen:
        return fresh
    inner = seen | {id(fresh)}
    if isinstance(fresh, tuple | list):
        items = [_remake(*pair, known, inner) for pair in zip(fresh, recorded, strict=False)]
        if len(items) < len(fresh):
            return fresh
        return fresh._make(items) if hasattr(fresh, "_make") else type(fresh)(items)
    if isinstance(fresh, Mapping):
        return _remake_mapping(fresh, recorded, known, inner)
    if not is_object(fresh):
        return fresh
    made = copy.copy(fresh)
    own = vars(recorded)
    for name, value in vars(fresh).items():
        if name in own:
            vars(made)[name] = _remake(value, own[name], known, inner)
    return made


def _remake_mapping(fresh: Any, recorded: Any, known: Mapping[int, Any], seen: set[int]) -> Any:
    made = copy.copy(fresh)
    for name in list(fresh):
        if name in recorded:
            made[name] = _remake(fresh[name], recorded[name], known, seen)
    return made
