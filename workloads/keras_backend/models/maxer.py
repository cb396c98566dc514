"""The seed's network: MNIST with far more layers than it needs, to load GPUs of different sizes. It never converges.

Source: jinkos/multi-gpus, gpu_maxing_model.py; 78,923,530 parameters, 2.0 GMAC forward per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import keras
import numpy as np

from evener.workloads.datasets import grey_noise
from evener.workloads.keras_backend.workload import KerasWorkload
from evener.workloads.protocol import Place, Workload

CONVOLUTIONS = (32, 64, 128, 256, "pool", 512, 512, 512, 512, "pool")
DENSE = (2048, 2048, 2048, 2048, 2048, 1024)


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `learning_rate`."""
    return KerasWorkload(place, partial(model, **settings), sample_batch)


def model(learning_rate: float = 0.001) -> Any:
    """The network, compiled with Adam and categorical cross-entropy, without metrics, as the seed has it."""
    layers: list[Any] = [keras.Input((28, 28, 1))]
    for filters in CONVOLUTIONS:
        if filters == "pool":
            layers.append(keras.layers.MaxPooling2D())
        else:
            layers.append(keras.layers.Conv2D(filters, 3, padding="same", activation="relu"))
    layers.append(keras.layers.Flatten())
    layers += [keras.layers.Dense(units, activation="relu") for units in DENSE]
    layers.append(keras.layers.Dense(10, activation="softmax", dtype="float32"))
    network = keras.Sequential(layers, name="maxer")
    network.compile(keras.optimizers.Adam(learning_rate), "categorical_crossentropy", jit_compile=False)
    return network


def sample_batch(rows: int) -> tuple[Any, Any]:
    """Grey values 0 to 255 and one-hot labels, of the shapes of MNIST; the content is noise."""
    x, labels = grey_noise(rows)
    return x, np.eye(10, dtype=np.float32)[labels]
