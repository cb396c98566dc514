"""Save and restore the variables that a user's loss function may change when an audit calls it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch

from .state import MOST_ITEMS, copy_data, restore_value

DEPTH = 4  # maximum depth of functions that call each other, and of nested objects
LARGE = 64 << 20  # maximum bytes of a tensor that is copied; larger ones are data, not metrics
_EMPTY = object()
_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
_FOREIGN = {
    *("torch", "numpy", "evener", "transformers", "accelerate", "lightning", "pytorch_lightning"),
    *("lightning_fabric", "trl", "peft", "datasets", "timm", "torchvision", "torchaudio"),
    *("torchmetrics", "diffusers", "deepspeed", "builtins"),
}


def keep_closure(function: Callable[..., Any] | None) -> Callable[[], None]:
    """Save the state that a function can change, and return a function that restores it.

    The state includes the function's closure variables and the globals that it uses, and also the
    objects and random generators that they contain. For None, nothing is saved.
    """
    kept = _SavedValues()
    kept.save(function, DEPTH)
    return kept.restore_all


class _SavedValues:
    """Saves the values that a function can reach, and restores them later."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._data: list[tuple[Any, Any]] = []
        self._states: list[Callable[[], None]] = []
        self._memo: dict[int, Any] = {}

    def save(self, value: Any, depth: int) -> None:
        """Save a value and everything that it refers to, up to `depth` levels deep."""
        # values that are already saved, and those that belong to libraries, are skipped
        if depth < 0 or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self.save(each, depth)
        elif isinstance(value, MethodType):
            self.save(value.__func__, depth)
            self.save(value.__self__, depth)
        elif isinstance(value, FunctionType):
            self._save_function(value, depth - 1)
        elif isinstance(value, _GENERATORS):
            self._states.append(_keep_generator(value))
        elif _is_data(value) and len(value) <= MOST_ITEMS:
            self._save_data(value, depth - 1)
        elif is_own_object(value):
            self._save_data(vars(value), depth - 1)

    def _save_data(self, data: Any, depth: int) -> None:
        self._data.append((data, copy_data(data, self._memo, LARGE)))
        for each in list(data.values() if isinstance(data, dict) else data):
            self.save(each, depth)

    def _save_function(self, function: FunctionType, depth: int) -> None:
        if is_foreign(function.__module__ or ""):
            return
        for cell in function.__closure__ or ():
            content = read_cell(cell)
            self._cells.append((cell, content))
            self._save_variable(content, depth)
        for name in list_names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._names.append((function.__globals__, name, value))
                self._save_variable(value, depth)

    def _save_variable(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._data.append((value, copy_data(value, self._memo, LARGE)))
        else:
            self.save(value, depth)

    def restore_all(self) -> None:
        """Restore all saved values."""
        for data, was in self._data:
            restore_value(data, was)
        for names, name, value in self._names:
            if names.get(name, _EMPTY) is not value:
                names[name] = value
        for cell, value in self._cells:
            if value is not _EMPTY and read_cell(cell) is not value:
                cell.cell_contents = value
        for state in self._states:
            state()


def is_foreign(module: str) -> bool:
    """Return whether a module name belongs to PyTorch, evener or another known library."""
    return module.partition(".")[0] in _FOREIGN


def list_names(code: CodeType) -> set[str]:
    """Return the names of globals that a function's code, or a function nested in it, may use."""
    # the result includes names of attributes, which Python stores in the same list
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= list_names(const)
    return found


def read_cell(cell: CellType) -> Any:
    """Return the value of a closure variable, or `_EMPTY` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _EMPTY


def _is_data(value: Any) -> bool:
    return isinstance(value, dict | list | set) or type(value).__name__ == "deque"


def is_own_object(value: Any) -> bool:
    """Return whether an object's class is defined by the user's script.

    The result is False for modules, optimizers and data sets, which are handled separately.
    """
    if isinstance(value, type | ModuleType | torch.Tensor | numpy.ndarray):
        return False
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.utils.data.Dataset):
        return False  # modules are restored separately
    origin = type(value).__module__.partition(".")[0]
    own = origin not in _FOREIGN and origin not in sys.stdlib_module_names
    return hasattr(value, "__dict__") and (own or origin == "__main__")


def _keep_generator(generator: Any) -> Callable[[], None]:
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        legacy: Any = generator.get_state()
        return partial(generator.set_state, legacy)
    return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
