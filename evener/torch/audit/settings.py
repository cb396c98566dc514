"""Detect that the user's script has changed a setting that affects its loss.

A setting is a number, flag or object that the loss depends on. It is used by a function of the
user's script, or stored in a module whose class the script defines. If a setting changes after it
has stayed the same for some steps, as a flag does in a later epoch, another audit is needed.
Counters change in every step and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .closures import is_foreign, is_own_object, list_names, read_cell

STILL = 3  # number of consecutive checks in which a setting must have been the same
DEPTH = 3  # maximum depth of nested objects
MOST = 400  # maximum number of settings that are checked; larger dicts aren't inspected
_PLAIN = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = vars(torch.nn.Module()).keys() - {"training"}  # attributes that aren't settings
Code = tuple[CodeType, Mapping[str, Any]]  # code with its module's variables
Key = tuple[int, Any]  # the id of the setting's holder, and the setting's name


class LossSettings:
    """Watches the settings that a loss may depend on, to detect changes between steps."""

    def __init__(self) -> None:
        self._checks = 0
        self._models: tuple[int, ...] = ()
        # settings of modules of the program's own classes
        self._modules: list[_ModuleSettings] = []
        self._others = _Known()  # settings of functions, code and holders

    def have_changed(
        self,
        models: Iterable[Any],
        function: Callable[..., Any] | None = None,
        code: Code | None = None,
        holders: Iterable[Any] = (),
    ) -> bool:
        """Return whether any setting has changed after staying the same for at least three checks.

        Arguments:

        - `models`: models, whose attributes are settings.
        - `function`: the loss function, whose variables are settings.
        - `code`: the code that computes the loss, with its global variables.
        - `holders`: further objects whose attributes are settings.
        """
        self._checks += 1
        found: dict[Key, Any] = {}
        for holder in holders:
            _collect_object(holder, DEPTH - 1, found)
        changed = False
        checked = len(found)
        for module in self._list_modules(models):
            if checked < MOST:
                changed |= module.has_changed(self._checks)
                checked += module.count
        if function is not None:
            _collect_settings(0, "function", function, DEPTH, found)
        if code is not None:
            _collect_globals(*code, DEPTH, found)
        return self._others.note(found, self._checks) or changed

    def _list_modules(self, models: Iterable[Any]) -> list[_ModuleSettings]:
        every = list(models)
        identity = tuple(map(id, every))
        if identity != self._models:
            self._models = identity
            modules = [part for each in every for part in each.modules()]
            own = [module for module in modules if not is_foreign(type(module).__module__)]
            self._modules = list(map(_ModuleSettings, own))
        return self._modules


class _Known:
    """Remembers the value of each setting, and for how many checks it has stayed the same."""

    # the values are those of the last check

    def __init__(self) -> None:
        self._values: dict[Key, tuple[Any, int]] = {}

    def note(self, settings: Mapping[Key, Any], check: int) -> bool:
        """Record the current settings; return whether any has changed after staying the same.

        A setting has stayed the same if its value didn't change for at least three checks. `check`
        is the index of the current check.
        """
        changed = False
        before, self._values = self._values, {}
        for key, value in settings.items():
            old, unchanged_since = before.get(key, (value, check))
            same = type(old) is type(value) and (old == value or old is value)
            changed |= not same and check - unchanged_since >= STILL
            self._values[key] = value, unchanged_since if same else check + 1
        return changed


class _ModuleSettings:
    """The settings among the attributes of one of the model's modules."""

    # Most modules have only numbers, flags and tensors. For these it is enough to check that their
    # attributes are the same objects, of the same types, as before.

    def __init__(self, module: Any) -> None:
        self.count = 0  # number of the module's settings
        self._held = vars(module)
        self._known = _Known()
        self._is_flat = False  # True if no attribute contains further settings
        self._types: tuple[type, ...] = ()  # of all attributes
        self._plain: dict[str, Any] = {}  # the numbers and flags
        self._ids: dict[str, int] = {}  # of the tensors, to which no references are held

    def has_changed(self, check: int) -> bool:
        """Return whether any setting of the module has changed after staying the same.

        A setting has stayed the same if its value didn't change for at least three checks. `check`
        is the index of the current check.
        """
        if self._is_flat and self._is_same():
            return False
        own = {name: each for name, each in self._held.items() if name not in _OF_EVERY_MODULE}
        found: dict[Key, Any] = {}
        _collect_members(self._held, own, DEPTH, found)
        self.count = len(found)
        self._types = tuple(map(type, self._held.values()))
        self._plain = {name: each for name, each in own.items() if isinstance(each, _PLAIN)}
        tensors = {name: each for name, each in own.items() if isinstance(each, torch.Tensor)}
        self._ids = {name: id(each) for name, each in tensors.items()}
        self._is_flat = found.keys() <= {
            (id(self._held), name) for name in (*self._plain, *self._ids)
        }
        return self._known.note(found, check)

    def _is_same(self) -> bool:
        held = self._held
        return (
            tuple(map(type, held.values())) == self._types
            and all(map(is_, map(held.get, self._plain), self._plain.values()))
            and list(map(id, map(held.get, self._ids))) == list(self._ids.values())
        )


def _collect_settings(
    holder: int, name: Any, value: Any, depth: int, settings: dict[Key, Any]
) -> None:
    """Add a variable or attribute to `settings`, including the settings inside its value.

    `holder` is the id of the object that the variable or attribute belongs to. Objects are searched
    up to `depth` levels deep.
    """
    if len(settings) >= MOST or depth < 0:
        return
    if isinstance(value, _PLAIN):
        settings[holder, name] = value
    elif isinstance(value, torch.Tensor):
        settings[holder, name] = id(value)
    elif isinstance(value, partial):
        for place, each in enumerate((value.func, *value.args, *value.keywords.values())):
            _collect_settings(holder, (name, place), each, depth, settings)
    elif isinstance(value, MethodType):
        _collect_settings(holder, name, value.__func__, depth, settings)
        _collect_settings(id(value.__func__), "self", value.__self__, depth, settings)
    elif isinstance(value, FunctionType):
        _collect_function(holder, name, value, depth, settings)
    elif isinstance(value, dict):
        settings[holder, name] = id(value)
        if len(value) < MOST:
            _collect_members(value, value, depth - 1, settings)
    elif is_own_object(value):
        settings[holder, name] = id(value)
        _collect_object(value, depth - 1, settings)


def _collect_object(value: Any, depth: int, settings: dict[Key, Any]) -> None:
    """Add the settings in an object's attributes, and in those of its classes, to `settings`.

    `depth` says how many levels of nested objects are searched.
    """
    # classes that a library defines are left out
    for kind in type(value).__mro__:
        if kind is not object and not is_foreign(kind.__module__):
            _collect_members(kind, vars(kind), depth, settings)
    _collect_members(value, vars(value), depth, settings)


def _collect_members(
    holder: Any, members: Mapping[Any, Any], depth: int, settings: dict[Key, Any]
) -> None:
    """Add the attributes or items of `holder` to `settings`, unless their names begin with "_".

    `members` has these attributes or items by name. With a `depth` of 0, only numbers, flags and
    strings are added.
    """
    for name, each in list(members.items()):
        if isinstance(each, _PLAIN) or depth > 0:
            plain = not isinstance(name, str) or not name.startswith("_")
            if plain and not isinstance(each, type | ModuleType | torch.nn.Module | FunctionType):
                _collect_settings(id(holder), name, each, depth, settings)


def _collect_function(
    holder: int, name: Any, function: FunctionType, depth: int, settings: dict[Key, Any]
) -> None:
    settings[holder, name] = id(function.__code__)
    if is_foreign(function.__module__ or ""):
        return
    names = function.__code__.co_freevars
    for own, cell in zip(names, function.__closure__ or (), strict=True):
        # a function defined in the loop is a new object in each step, but its variables aren't
        _collect_settings(id(cell), own, read_cell(cell), depth - 1, settings)
    _collect_globals(function.__code__, function.__globals__, depth - 1, settings)


def _collect_globals(
    code: CodeType, variables: Mapping[str, Any], depth: int, settings: dict[Key, Any]
) -> None:
    for name in sorted(list_names(code)):
        value = variables.get(name)
        if name in variables and not isinstance(value, type | ModuleType):
            _collect_settings(id(variables), name, value, depth, settings)
