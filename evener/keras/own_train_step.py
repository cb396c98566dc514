"""Runs a user's own `train_step`, in which `super().train_step` runs the engine's step."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import keras

from ..errors import RequestError
from .keras_step import Tensors

Step = Callable[[Tensors], dict[str, Any]]

_inner: ContextVar[Step] = ContextVar("_inner")  # the step that super().train_step finds


class _EngineStep(keras.Model):  # type: ignore[misc]
    """Base class whose `train_step` runs a step of evener's engine.

    In the method resolution order, it follows the user's classes and precedes `keras.Model`, so
    `super().train_step` finds it.
    """

    def train_step(self, data: Tensors) -> dict[str, Any]:
        return _inner.get()(data)


def _make_view(model: Any) -> Any:
    """Return an object with the model's attributes, in which `super().train_step` runs the engine.

    The user's `train_step` runs on this object. Attributes that it sets are also set on the model.
    """
    kind = type(model)
    make_class: Any = type(kind)
    above = make_class(kind.__name__, (kind, _EngineStep), {"__module__": kind.__module__})
    view = object.__new__(above)
    object.__setattr__(view, "__dict__", vars(model))
    return view


class OwnTrainStep:
    """Runs the user's `train_step`, in which `super().train_step` runs the engine's step."""

    def __init__(self, model: Any, step: Step) -> None:
        self._model = model
        self._step = step

    def __call__(self, data: Tensors) -> Any:
        """Train on a batch, and return the logs.

        Raises RequestError unless the user's step calls `super().train_step` exactly once.
        """
        kind = type(self._model)
        calls: list[Tensors] = []

        def run(data: Tensors) -> dict[str, Any]:
            calls.append(data)
            return self._step(data)

        token = _inner.set(run)
        try:
            logs = kind.train_step(_make_view(self._model), data)
        finally:
            _inner.reset(token)
        if len(calls) != 1:
            times = "never" if not calls else f"{len(calls)} times"
            raise RequestError(
                f"{kind.__name__} has a train_step of its own that calls super().train_step"
                f" {times}, so a split would replace what it computes.",
                "Call super().train_step(data) once and add to it, move the loss to compute_loss,"
                " or write a loop that weights the gradients itself.",
            )
        return logs
