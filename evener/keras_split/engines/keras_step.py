"""Keras' own step: the parts of it that every engine keeps, and engine solo, which runs it on one device."""

from __future__ import annotations

from typing import Any

from evener.keras_split.nested_rows import Tensors


def call_model(model: Any, x: Tensors, training: bool) -> Tensors:
    """The model on these rows; `training` is passed only to a `call` that has that argument."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def update_metrics(
    model: Any, loss: Any, rows: Any, x: Tensors, y: Tensors, outputs: Tensors, weight: Any
) -> dict[str, Any]:
    """Count a loss that is the mean over `rows` in Keras' own tracker, and the batch in the model's metrics."""
    model._loss_tracker.update_state(loss, sample_weight=rows)
    logs: dict[str, Any] = model.compute_metrics(x, y, outputs, sample_weight=weight)
    return logs


class SingleDevice:
    """Keras' own steps, on a device that need not be TensorFlow's first."""

    name = "solo"

    def __init__(self, model: Any) -> None:
        self.model = model
