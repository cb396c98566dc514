"""Keras' own steps: what every engine's step keeps of them, and engine solo, which runs them on one device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

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
    """The model's own steps, in the scope of a device that need not be TensorFlow's first."""

    name = "solo"

    def __init__(self, model: Any, device: str) -> None:
        self.model = model
        self.device = device

    @property
    def xla(self) -> bool:
        """XLA compiles for TensorFlow's first device only."""
        return self.device.endswith(":0")

    def train_step(self, data: Tensors) -> Any:
        """The model's own."""
        return self._run("train_step", data)

    def test_step(self, data: Tensors) -> Any:
        """The model's own."""
        return self._run("test_step", data)

    def predict_step(self, data: Tensors) -> Any:
        """The model's own."""
        return self._run("predict_step", data)

    def _run(self, step: str, data: Tensors) -> Any:
        with tf.device(self.device):
            return getattr(type(self.model), step)(self.model, data)
