"""Functions on the values in nested tuples, lists, dicts and slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# functions, also as in-place variants, that compute with numbers among their arguments
_ARITHMETIC = {
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "truediv",
    "add",
    "sub",
    "pow",
    "lerp",
}


def map_nested(function: Callable[[Any], Any], data: Any) -> Any:
    """Return a copy of nested data with `function` applied to each value."""
    if isinstance(data, dict):
        return {key: map_nested(function, each) for key, each in data.items()}
    if isinstance(data, slice):
        return slice(*(map_nested(function, each) for each in (data.start, data.stop, data.step)))
    if isinstance(data, tuple | list):
        items = [map_nested(function, each) for each in data]
        return (
            data._make(items)
            if hasattr(data, "_make")
            else items
            if isinstance(data, list)
            else tuple(items)
        )
    return function(data)


def leaves_in(data: Any) -> list[Any]:
    """Return all values in nested data as a flat list."""
    found: list[Any] = []
    map_nested(found.append, data)
    return found


def is_arithmetic(function: Any) -> bool:
    """Return whether a PyTorch function, such as `mul`, takes numbers as operands."""
    name = str(getattr(function, "__name__", "")).strip("_").removeprefix("foreach_")
    return bool({name, name[1:]} & _ARITHMETIC)


def nested_tensors(data: Any) -> list[torch.Tensor]:
    """Return all tensors in nested data or in the fields of a dataclass."""
    if hasattr(data, "__dataclass_fields__"):
        data = {name: getattr(data, name) for name in data.__dataclass_fields__}
    return [each for each in leaves_in(data) if isinstance(each, torch.Tensor)]
