"""Solo: one device, Keras' own steps, on whichever device it is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from evener.keras_split.nested_rows import Tensors


class Alone:
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
        with tf.device(self.device):
            return type(self.model).train_step(self.model, data)

    def test_step(self, data: Tensors) -> Any:
        """The model's own."""
        with tf.device(self.device):
            return type(self.model).test_step(self.model, data)

    def predict_step(self, data: Tensors) -> Any:
        """The model's own."""
        with tf.device(self.device):
            return type(self.model).predict_step(self.model, data)
