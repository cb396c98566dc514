"""List the parameters and buffers of a model, and cache the lists until a new one is registered.

PyTorch's own `parameters()` and `buffers()` visit every module of the model. Calling them in each
step would take longer than a small model's forward pass.
"""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

from torch.nn.modules import module as modules

from .hooks import ProcessHooks
from .private import own_buffers

_REQUIRES_GRAD = attrgetter("requires_grad")


class _Registered:
    """Counts the registrations of modules, parameters and buffers in this process."""

    def __init__(self) -> None:
        self.parameters = self.buffers = 0

    def count_module(self, *_: Any) -> None:
        self.parameters += 1
        self.buffers += 1

    def count_parameter(self, *_: Any) -> None:
        self.parameters += 1

    def count_buffer(self, *_: Any) -> None:
        self.buffers += 1


_registered = _Registered()


def _register() -> list[Any]:
    return [
        modules.register_module_module_registration_hook(_registered.count_module),
        modules.register_module_parameter_registration_hook(_registered.count_parameter),
        modules.register_module_buffer_registration_hook(_registered.count_buffer),
    ]


_HOOKS = ProcessHooks(_register)


class Members:
    """Lists the parameters and buffers of a model, which it references only weakly."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        _HOOKS.hold(self)
        self._parameters: list[Any] = []
        self._ids: tuple[int, ...] = ()
        self._parameters_at = -1  # `_registered.parameters` when they were listed
        self._owners: list[tuple[str, dict[str, Any]]] = []
        self._owners_at = -1  # `_registered.buffers` when they were listed

    def trained(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return the ids of all parameters, and whether each of them requires a gradient.

        Both are empty if the model no longer exists.
        """
        if self._parameters_at != _registered.parameters:
            model = self._model()
            self._parameters = [] if model is None else list(model.parameters())
            self._ids = tuple(map(id, self._parameters))
            self._parameters_at = _registered.parameters
        return self._ids, tuple(map(_REQUIRES_GRAD, self._parameters))

    def buffers(self) -> list[tuple[str, Any]]:
        """Return the names and tensors of all buffers; a buffer of two modules is listed twice."""
        if self._owners_at != _registered.buffers:
            model = self._model()
            named = [] if model is None else model.named_modules()
            self._owners = [(name, own_buffers(each)) for name, each in named if own_buffers(each)]
            self._owners_at = _registered.buffers
        return [
            (f"{owner}.{name}" if owner else name, each)
            for owner, own in self._owners
            for name, each in own.items()
            if each is not None
        ]

    def buffers_at(self) -> int:
        """Return a number that changes whenever a buffer is registered in this process.

        Callers compare it to know if the result of `buffers` is still current.
        """
        return _registered.buffers
