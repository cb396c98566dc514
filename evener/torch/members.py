"""List a model's parameters and buffers, and cache the lists until it registers another.

PyTorch's `parameters()` and `buffers()` visit every module. In each step, that would take longer
than a small model's forward pass.
"""

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
    """Caches a model's parameters and buffers until one of its modules registers another tensor.

    Only a weak reference to the model is held.
    """

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
        """Called when a module, `parent`, registers a parameter, buffer or submodule.

        It may be any module of the process. `parameters` and `buffers` say what may be new; both
        are True for a submodule.
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
        """Return the id of each parameter, and whether it requires a gradient.

        Both are empty once the model no longer exists.
        """
        if self._parameters is None:
            self._list_modules()
            model = self._model()
            self._parameters = [] if model is None else list(model.parameters())
            self._ids = tuple(map(id, self._parameters))
        return self._ids, tuple(map(_REQUIRES_GRAD, self._parameters))

    def buffers(self) -> list[tuple[str, Any]]:
        """Return all buffers with their names; a buffer that two modules share is listed twice."""
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
        """Return a number that changes whenever the model registers a buffer or module.

        A list from `buffers` may then be outdated.
        """
        return self._registered
