"""Handle batches that are objects with tensors in their attributes, such as graph batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_NO_BATCHES = (torch.Tensor, torch.nn.Module, type, FunctionType, MethodType, ModuleType)


def is_object(data: Any) -> bool:
    """Return whether data is an object that may have tensors as attributes."""
    containers = (tuple, list, Mapping)
    return hasattr(data, "__dict__") and not isinstance(data, (*_NO_BATCHES, *containers))


def unfold(data: Any) -> Any:
    """Convert objects that have tensors to plain dicts and lists of tensors.

    Data without such objects is returned unchanged.
    """
    return _collect_tensors(data, set()) if find_objects(data) else data


def _collect_tensors(data: Any, containers: set[int]) -> Any:
    """Convert nested data to plain dicts and lists of tensors; return None if it has no tensors.

    `containers` has the ids of the enclosing objects, to stop at circular references.
    """
    if isinstance(data, torch.Tensor):
        return data
    # objects may refer to each other in a circle
    if id(data) in containers:
        return None
    containers = containers | {id(data)}
    content = vars(data) if is_object(data) else data
    if isinstance(content, Mapping):
        return _collect_values(content, containers)
    if isinstance(content, tuple | list):
        return _collect_items(content, containers)
    return None


def _collect_values(mapping: Mapping[Any, Any], containers: set[int]) -> dict[Any, Any] | None:
    """Convert a mapping to nested dicts and lists of tensors, leaving out values without tensors.

    The result is None if no value has any. `containers` has the ids of the enclosing objects.
    """
    values = {name: _collect_tensors(mapping[name], containers) for name in mapping}
    return {name: value for name, value in values.items() if value is not None} or None


def _collect_items(items: Sequence[Any], containers: set[int]) -> list[Any] | None:
    """Convert a sequence to nested lists and dicts of tensors, leaving out items without tensors.

    The result is None if no item has tensors. `containers` has the ids of the enclosing objects.
    """
    collected = [_collect_tensors(item, containers) for item in items]
    return [item for item in collected if item is not None] or None


def find_objects(data: Any) -> list[Any]:
    """Return the outermost objects in nested data that contain tensors."""
    if isinstance(data, Mapping):
        return [found for name in data for found in find_objects(data[name])]
    if isinstance(data, tuple | list):
        return [found for each in data for found in find_objects(each)]
    return [data] if is_object(data) and _collect_tensors(data, set()) else []


def remake(fresh: Any, recorded: Any, known: Mapping[int, Any]) -> Any:
    """Return a copy of the object `fresh` with its tensors replaced.

    `recorded` is an object of the same structure, and `known` has a replacement for each of its
    tensors, by the tensor's id. A tensor in `fresh` gets the replacement of the tensor at the same
    position in `recorded`.
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
