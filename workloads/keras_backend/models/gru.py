"""Four recurrent layers and a dense one: a model whose step time is flat up to large batches.

Source: the seed on several GPUs in Keras, 4 x GRU 512 and Dense 128. The sequences are made in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import keras

from evener.errors import RequestError
from evener.workloads.datasets import sine_waves
from evener.workloads.keras_backend.workload import KerasWorkload
from evener.workloads.protocol import Place, Workload

CUDNN = {"auto": "auto", "true": True, "false": False}


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `steps`, `features`, `units`, `layers`, `dense`, `classes`, `use_cudnn`."""
    shape = {key: settings[key] for key in ("steps", "features", "classes")}
    return KerasWorkload(place, partial(model, **settings), partial(sine_waves, **shape))


def model(
    steps: int = 64,
    features: int = 32,
    units: int = 512,
    layers: int = 4,
    dense: int = 128,
    classes: int = 10,
    use_cudnn: str | bool = "auto",
    learning_rate: float = 0.001,
) -> Any:
    """`layers` GRUs of `units`, a dense layer and a softmax, compiled with Adam."""
    chosen = CUDNN.get(str(use_cudnn).lower())
    if chosen is None:
        raise RequestError(f"use_cudnn can't be {use_cudnn!r}.", "It is auto, true or false.")
    stack = [keras.layers.GRU(units, return_sequences=i < layers - 1, use_cudnn=chosen) for i in range(layers)]
    head = [
        keras.layers.Dense(dense, activation="relu"),
        keras.layers.Dense(classes, activation="softmax", dtype="float32"),
    ]
    network = keras.Sequential([keras.Input((steps, features)), *stack, *head], name="gru")
    network.compile(
        keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
    )
    return network
