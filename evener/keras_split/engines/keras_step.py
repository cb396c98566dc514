"""What every engine's step does as Keras' own does: how it calls the model, and what it reports."""

from __future__ import annotations

from typing import Any

import keras

from evener.keras_split.nested_rows import Tensors


def call(model: Any, x: Tensors, training: bool) -> Tensors:
    """The model on these rows; only a `call` with an argument `training` is told."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def report(model: Any, loss: Any, rows: Any, x: Tensors, y: Tensors, outputs: Tensors, weight: Any) -> dict[str, Any]:
    """Count a loss that is the mean over `rows` in Keras' own tracker, and the batch in the model's metrics."""
    model._loss_tracker.update_state(loss, sample_weight=rows)
    logs: dict[str, Any] = model.compute_metrics(x, y, outputs, sample_weight=weight)
    return logs


def overrides(model: Any, name: str) -> bool:
    """Whether the model's class has a method of its own in the place of Keras'."""
    return getattr(type(model), name) not in (getattr(keras.Model, name), getattr(keras.Sequential, name))
