"""The classifiers among the Keras models: keras_maxer, keras_mnist, keras_gru and keras_resnet50.

All data are made in code. Sources are in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers

from evener.errors import RequestError

from ..datasets import digits, grey_noise, sine_waves, stripes
from ..protocol import Place, Workload
from .workload import KerasWorkload

CONVOLUTIONS = (32, 64, 128, 256, "pool", 512, 512, 512, 512, "pool")
DENSE = (2048, 2048, 2048, 2048, 2048, 1024)
CUDNN = {"auto": "auto", "true": True, "false": False}
SMALLEST_SIDE = 32  # keras.applications takes no less
SPARSE = "sparse_categorical_crossentropy"


def build_maxer(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `learning_rate`."""
    return KerasWorkload(place, partial(maxer, **settings), maxer_batch)


def maxer(learning_rate: float = 0.001) -> Any:
    """The seed's network for MNIST, with far more layers than it needs: 78,923,530 parameters. It never converges."""
    blocks = [layers.MaxPooling2D() if each == "pool" else _convolution(each) for each in CONVOLUTIONS]
    dense = [layers.Dense(units, activation="relu") for units in DENSE]
    stack = [keras.Input((28, 28, 1)), *blocks, layers.Flatten(), *dense, _softmax(10)]
    return _compiled(keras.Sequential(stack, name="maxer"), learning_rate, "categorical_crossentropy")


def maxer_batch(rows: int) -> tuple[Any, Any]:
    """Grey values 0 to 255 and one-hot labels, of the shapes of MNIST; the content is noise."""
    x, labels = grey_noise(rows)
    return x, np.eye(10, dtype=np.float32)[labels]


def build_mnist(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `filters`, `dense`, `learning_rate`."""
    return KerasWorkload(place, partial(mnist, **settings), digits)


def mnist(filters: int = 16, dense: int = 64, learning_rate: float = 0.001) -> Any:
    """Two convolutions and two dense layers."""
    blocks = [_convolution(filters), layers.MaxPooling2D(), _convolution(2 * filters), layers.MaxPooling2D()]
    head = [layers.Flatten(), layers.Dense(dense, activation="relu"), _softmax(10)]
    network = keras.Sequential([keras.Input((28, 28, 1)), *blocks, *head], name="mnist")
    return _compiled(network, learning_rate, SPARSE, metrics=["accuracy"])


def build_gru(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `steps`, `features`, `units`, `layers`, `dense`, `classes`, `use_cudnn`."""
    shape = {key: settings[key] for key in ("steps", "features", "classes")}
    return KerasWorkload(place, lambda: gru(**settings), partial(sine_waves, **shape))


def gru(use_cudnn: str | bool, learning_rate: float, **sizes: int) -> Any:
    """GRUs, a dense layer and a softmax; their step time is flat up to large batches."""
    chosen = CUDNN.get(str(use_cudnn).lower())
    if chosen is None:
        raise RequestError(f"use_cudnn can't be {use_cudnn!r}.", "It is auto, true or false.")
    last = sizes["layers"] - 1
    stack = [layers.GRU(sizes["units"], return_sequences=i < last, use_cudnn=chosen) for i in range(last + 1)]
    head = [layers.Dense(sizes["dense"], activation="relu"), _softmax(sizes["classes"])]
    network = keras.Sequential([keras.Input((sizes["steps"], sizes["features"])), *stack, *head], name="gru")
    return _compiled(network, learning_rate, SPARSE, metrics=["accuracy"])


def build_resnet50(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `side`, `classes`, `learning_rate`."""
    side, classes = settings["side"], settings["classes"]
    if side < SMALLEST_SIDE or classes < 2:
        raise RequestError(
            f"keras_resnet50 can't have side={side} and classes={classes}.",
            f"side is {SMALLEST_SIDE} or more, classes 2 or more.",
        )
    return KerasWorkload(place, partial(resnet50, **settings), partial(stripes, side=side, classes=classes))


def resnet50(side: int = 32, classes: int = 10, learning_rate: float = 0.001) -> Any:
    """keras.applications.ResNet50 from random weights."""
    network = keras.applications.ResNet50(
        weights=None, input_shape=(side, side, 3), classes=classes, classifier_activation=None
    )
    return _compiled(network, learning_rate, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def _convolution(filters: object) -> Any:
    return layers.Conv2D(filters, 3, padding="same", activation="relu")


def _softmax(classes: int) -> Any:
    return layers.Dense(classes, activation="softmax", dtype="float32")


def _compiled(network: Any, learning_rate: float, loss: Any, **options: Any) -> Any:
    network.compile(keras.optimizers.Adam(learning_rate), loss, jit_compile=False, **options)
    return network
