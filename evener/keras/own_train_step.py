"""Runs an overridden `train_step` around an engine's step instead of around Keras' own.

It must call `super().train_step(data)`; typically it adds a value to the logs.
"""

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
    """A base class between the user's classes and Keras', whose step is an engine's."""

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Run the engine's step."""
        return _inner.get()(data)


def _above_engine(kind: type) -> type:
    """Return a class like this one whose `super().train_step` is the engine's step."""
    made: type = type(kind)(kind.__name__, (kind, _EngineStep), {"__module__": kind.__module__})
    return made


class OwnTrainStep:
    """The model's own `train_step` around the step of an engine; both are traced as one graph.

    Raises RequestError unless it calls `super().train_step` exactly once, because otherwise its
    gradients wouldn't be the engine's.
    """

    def __init__(self, model: Any, step: Step) -> None:
        self._model = model
        self._step = step

    def __call__(self, data: Tensors) -> Any:
        """Run the step and return the logs of the model's own `train_step`."""
        model = self._model
        kind = type(model)
        calls: list[Tensors] = []

        def run(data: Tensors) -> dict[str, Any]:
            calls.append(data)
            return self._step(data)

        token = _inner.set(run)
        model.__class__ = _above_engine(kind)
        try:
            logs = kind.train_step(model, data)
        finally:
            model.__class__ = kind
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
