"""List a model's parameters and buffers, and cache both lists until it registers a new tensor.

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
    """Lists the parameters and buffers of a model, which it references only weakly.

    They are listed again only if one of the model's own modules registers a parameter, buffer or
    module.
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
        """Note that the module `parent` registers a parameter, buffer or module.

        `parent` may be part of the model or not. `parameters` and `buffers` say what it may have
        registered; both are True for a module.
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
        """Return the ids of all parameters, and whether each of them requires a gradient.

        Both are empty if the model no longer exists.
        """
        if self._parameters is None:
            self._list_modules()
            model = self._model()
            self._parameters = [] if model is None else list(model.parameters())
            self._ids = tuple(map(id, self._parameters))
        return self._ids, tuple(map(_REQUIRES_GRAD, self._parameters))

    def buffers(self) -> list[tuple[str, Any]]:
        """Return all buffers with their names; a buffer that two modules share occurs twice."""
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
        """Return a number that changes whenever the model registers a buffer or a module.

        An earlier result of `buffers` may then be outdated.
        """
        return self._registered
