"""A small convolutional network on pictures of digits: the default on CPU slices. The pictures are made in code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import keras

from evener.workloads.datasets import digits
from evener.workloads.keras_backend.workload import KerasWorkload
from evener.workloads.protocol import Place, Workload


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `filters`, `dense`, `learning_rate`."""
    return KerasWorkload(place, partial(model, **settings), digits)


def model(filters: int = 16, dense: int = 64, learning_rate: float = 0.001) -> Any:
    """Two convolutions and two dense layers, compiled with Adam."""
    network = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(2 * filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(dense, activation="relu"),
            keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ],
        name="mnist",
    )
    network.compile(
        keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
    )
    return network
