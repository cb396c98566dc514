"""ResNet-50 on pictures of CIFAR's size: a network that keeps a GPU busier than the small ones.

Source: the slides "Squeeze more juice out of a single GPU in deep learning", which pack it on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import keras

from evener.errors import RequestError
from evener.workloads.datasets import stripes
from evener.workloads.keras_backend.workload import KerasWorkload
from evener.workloads.protocol import Place, Workload

SMALLEST_SIDE = 32  # keras.applications takes no less


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `side`, `classes`, `learning_rate`."""
    side, classes = settings["side"], settings["classes"]
    if side < SMALLEST_SIDE or classes < 2:
        raise RequestError(
            f"keras_resnet50 can't have side={side} and classes={classes}.",
            f"side is {SMALLEST_SIDE} or more, classes 2 or more.",
        )
    return KerasWorkload(place, partial(model, **settings), partial(stripes, side=side, classes=classes))


def model(side: int = 32, classes: int = 10, learning_rate: float = 0.001) -> Any:
    """keras.applications.ResNet50 from random weights, compiled with Adam."""
    network = keras.applications.ResNet50(
        weights=None, input_shape=(side, side, 3), classes=classes, classifier_activation=None
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(learning_rate), loss, jit_compile=False)
    return network
