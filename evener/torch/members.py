"""Cache the lists of a model's parameters and buffers until the model registers a new one."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

from torch.nn.modules import module as modules

from .hooks import ProcessHooks
from .private import own_buffers

_REQUIRES_GRAD = attrgetter("requires_grad")
_EVERY: weakref.WeakSet[Members] = weakref.WeakSet()


def _note_all(parent: Any, *_: Any) -> None:
    for each in _EVERY:
        each.note(parent, parameters=True, buffers=True)


def _note_parameter(parent: Any, *_: Any) -> None:
    for each in _EVERY:
        each.note(parent, parameters=True)


def _note_buffer(parent: Any, *_: Any) -> None:
    for each in _EVERY:
        each.note(parent, buffers=True)


def _register() -> list[Any]:
    return [
        modules.register_module_module_registration_hook(_note_all),
        modules.register_module_parameter_registration_hook(_note_parameter),
        modules.register_module_buffer_registration_hook(_note_buffer),
    ]


_HOOKS = ProcessHooks(_register)


class Members:
    """Cached lists of the parameters and buffers of a model."""

    # modules outside the model often register some: transformers' models make a new ModuleList in
    # each forward pass

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        _HOOKS.hold(self)
        _EVERY.add(self)
        self._modules: set[int] = set()  # the ids of the model's modules
        self._parameters: list[Any] | None = None  # None if they have to be listed again
        self._ids: tuple[int, ...] = ()
        self._owners: list[tuple[str, dict[str, Any]]] | None = None  # likewise
        self._registered = 0  # buffers and modules that the model has registered

    def note(self, parent: Any, parameters: bool = False, buffers: bool = False) -> None:
        """Called when the module `parent` registers a parameter, a buffer or a submodule.

        The cached lists are discarded if `parent` belongs to the model. `parameters` and `buffers`
        say which of them may have changed.
        """
        if id(parent) not in self._modules:
            return
        if parameters:
            self._parameters = None
        if buffers:
            self._owners = None
            self._registered += 1

    def _list_modules(self) -> list[tuple[str, Any]]:
        model = self._model()
        named = [] if model is None else list(model.named_modules())
        self._modules = {id(each) for _, each in named}
        return named

    def trained(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return the ids of the model's parameters, and whether each requires a gradient.

        Both are empty if the model no longer exists.
        """
        if self._parameters is None:
            self._list_modules()
            model = self._model()
            self._parameters = [] if model is None else list(model.parameters())
            self._ids = tuple(map(id, self._parameters))
        return self._ids, tuple(map(_REQUIRES_GRAD, self._parameters))

    def buffers(self) -> list[tuple[str, Any]]:
        """Return the model's buffers with their names.

        A buffer that two modules share occurs twice.
        """
        if self._owners is None:
            named = self._list_modules()
            self._owners = [(name, own_buffers(each)) for name, each in named if own_buffers(each)]
        return [
            (f"{owner}.{name}" if owner else name, each)
            for owner, own in self._owners
            for name, each in own.items()
            if each is not None
        ]

    def buffers_at(self) -> int:
        """Return a counter that increases whenever the model registers a buffer or a submodule."""
        return self._registered
