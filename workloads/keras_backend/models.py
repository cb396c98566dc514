"""Built-in Keras models, and functions that make batches of synthetic data for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from evener.errors import RequestError

from ..datasets import digits, grey_noise, sine_waves, stripes
from ..protocol import WorkerSetup, Workload, pick
from .workload import KerasRecipe, KerasWorkload

CONVOLUTIONS = (32, 64, 128, 256, "pool", 512, 512, 512, 512, "pool")
DENSE = (2048, 2048, 2048, 2048, 2048, 1024)
CUDNN = {"auto": "auto", "true": True, "false": False}
SPARSE = "sparse_categorical_crossentropy"
TOWERS = ("user", "item")
TOWER = ("conv", "pool", "flat", "dense")  # the operations of each tower after the embedding lookup


def maxer(learning_rate: float = 0.001) -> Any:
    """Return a compiled MNIST network that is much larger than needed (78.9 million parameters)."""
    stack = [keras.Input((28, 28, 1))]
    stack += [_convolution_or_pool(each) for each in CONVOLUTIONS]
    stack.append(layers.Flatten())
    stack += [layers.Dense(units, activation="relu") for units in DENSE]
    network = keras.Sequential([*stack, _softmax(10)], name="maxer")
    return _compiled(network, learning_rate, "categorical_crossentropy")


def maxer_batch(rows: int) -> tuple[Any, Any]:
    """Return a batch of random images with one-hot labels."""
    x, labels = grey_noise(rows)
    return x, np.eye(10, dtype=np.float32)[labels]


def mnist(filters: int = 16, dense: int = 64, learning_rate: float = 0.001) -> Any:
    """Return a small compiled convolutional network for 28 x 28 images."""
    blocks = [
        _convolution(filters),
        layers.MaxPooling2D(),
        _convolution(2 * filters),
        layers.MaxPooling2D(),
    ]
    head = [layers.Flatten(), layers.Dense(dense, activation="relu"), _softmax(10)]
    network = keras.Sequential([keras.Input((28, 28, 1)), *blocks, *head], name="mnist")
    return _compiled(network, learning_rate, SPARSE, metrics=["accuracy"])


def gru(use_cudnn: str | bool, learning_rate: float, **sizes: int) -> Any:
    """Return a compiled network of stacked GRU layers, for the classification of sequences.

    `sizes` has `steps`, `features`, `units`, `layers`, `dense` and `classes`. Raises `RequestError`
    if `use_cudnn` isn't auto, true or false.
    """
    chosen = CUDNN.get(str(use_cudnn).lower())
    if chosen is None:
        raise RequestError(f"use_cudnn can't be {use_cudnn!r}.", "It is auto, true or false.")
    stack = [keras.Input((sizes["steps"], sizes["features"]))]
    for number in range(1, sizes["layers"] + 1):
        whole = (
            number < sizes["layers"]
        )  # whole sequences for the next GRU; the dense layer needs only the last step
        stack.append(layers.GRU(sizes["units"], return_sequences=whole, use_cudnn=chosen))
    stack += [layers.Dense(sizes["dense"], activation="relu"), _softmax(sizes["classes"])]
    network = keras.Sequential(stack, name="gru")
    return _compiled(network, learning_rate, SPARSE, metrics=["accuracy"])


def resnet50(side: int = 32, classes: int = 10, learning_rate: float = 0.001) -> Any:
    """Return a compiled ResNet-50 with random weights, for images of `side` x `side` pixels."""
    network = keras.applications.ResNet50(
        weights=None, input_shape=(side, side, 3), classes=classes, classifier_activation=None
    )
    return _compiled(
        network, learning_rate, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


def _convolution_or_pool(each: object) -> Any:
    return layers.MaxPooling2D() if each == "pool" else _convolution(each)


def _convolution(filters: object) -> Any:
    return layers.Conv2D(filters, 3, padding="same", activation="relu")


def _softmax(classes: int) -> Any:
    return layers.Dense(classes, activation="softmax", dtype="float32")


def _compiled(network: Any, learning_rate: float, loss: Any, **options: Any) -> Any:
    network.compile(keras.optimizers.Adam(learning_rate), loss, jit_compile=False, **options)
    return network


def tower_devices(setup: WorkerSetup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the device of each layer of the first tower, and of each layer of the second tower.

    The layers are embedding, convolution, pooling, flattening and dense. With the placement
    "towers", the second tower is on the second device, except the embedding, which both share. With
    "alternate", both towers change devices from layer to layer.
    """
    first, second = setup.devices[:2]
    if setup.placement == "towers":
        of_user = (first, first, first, first, first)
        of_item = (first, second, second, second, second)
    else:
        of_user = (first, second, first, second, first)
        of_item = (first, first, second, first, second)
    return of_user, of_item


def towers(
    learning_rate: float, devices: Sequence[Sequence[str | None]] | None = None, **sizes: int
) -> Any:
    """Return a compiled model with two convolutional towers that predicts ratings from reviews.

    The towers share an embedding. `devices` has the devices of each tower's layers; if it is None,
    TensorFlow chooses. Raises `RequestError` if the kernel isn't shorter than the reviews.
    """
    words = sizes["words"]
    kernel = sizes["kernel"]
    if words <= kernel:
        raise RequestError(
            f"keras_towers can't have kernel={kernel} over words={words}.", "Give more words."
        )
    table = layers.Embedding(sizes["vocabulary"], sizes["embedding"], name="words")
    inputs = []
    ends = []
    for name, places in zip(TOWERS, devices or ((None,) * 5,) * 2, strict=True):
        tower = [
            table,
            layers.Conv1D(sizes["filters"], kernel, activation="tanh", name=f"{name}_conv"),
            layers.MaxPooling1D(2, strides=1, name=f"{name}_pool"),
            layers.Flatten(name=f"{name}_flat"),
            layers.Dense(sizes["dense"], activation="relu", name=f"{name}_dense"),
        ]
        flow = keras.Input((words,), dtype="int32")
        inputs.append(flow)
        for layer, device in zip(tower, places, strict=True):
            with tf.device(device):
                flow = layer(flow)
        ends.append(flow)
    rating = layers.Dot(axes=1, dtype="float32", name="rating")(ends)
    network = keras.Model(inputs, rating, name="towers")
    optimizer = DenseAdam if devices is None else AdamInPlace
    network.compile(optimizer(learning_rate), "mean_squared_error", jit_compile=False)
    return network


class DenseAdam(keras.optimizers.Adam):  # type: ignore[misc]  # keras is not followed
    """Adam that first converts sparse gradients, such as those of embeddings, to dense tensors.

    On one device, Keras' own Adam would square the gradient of each look-up separately. The model
    would then learn differently than in a group of processes.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Convert the gradients to dense tensors, and update the variables with them."""
        dense = [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
        super().apply(dense, trainable_variables)


class AdamInPlace(DenseAdam):
    """Adam that updates each weight on the device that holds it."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one weight on its own device."""
        weight = variable if isinstance(variable, tf.Variable) else variable.value
        with tf.device(weight.device):
            super().update_step(gradient, variable, learning_rate)


def placed_step(places: Sequence[Sequence[str]], model: Any, batch: Any) -> dict[str, Any]:
    """Train the two-tower model for one step, with its layers placed on several devices.

    `places` has the devices of each tower's layers. The gradient of a layer is computed on the
    layer's device.
    """
    x, y = batch
    variables = model.trainable_variables
    ends = []
    for tower, devices, flow in zip(TOWERS, places, x, strict=True):
        ends.append(call_tower(model, tower, devices, flow))
    first_device = places[0][0]
    with tf.device(first_device):
        rating = model.get_layer("rating")(ends)
        loss = model.compute_loss(x=x, y=y, y_pred=rating)
        scaled = model.optimizer.scale_loss(loss)
        # unlike a tape, this computes an operation's gradient on the operation's device
        gradients = tf.gradients(scaled, [variable.value for variable in variables])
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return {"loss": loss}


def call_tower(model: Any, tower: str, devices: Sequence[str], inputs: Any) -> Any:
    """Return the output of one tower, with each layer computed on its device.

    `tower` is the tower's name, and `devices` are the devices of its layers.
    """
    names = ("words", *(f"{tower}_{kind}" for kind in TOWER))
    for name, device in zip(names, devices, strict=True):
        with tf.device(device):
            inputs = model.get_layer(name)(inputs)
    return inputs


def reviews(rows: int, words: int = 800, vocabulary: int = 20_000) -> tuple[Any, Any]:
    """Return synthetic reviews as token ids, with ratings from 1 to 5.

    Each row has a review by a user, a review of an item, and a rating, which depends on how similar
    the two reviews are. The result is ((users, items), ratings). The token ids have shape (rows,
    words), the ratings (rows, 1).
    """
    random = np.random.default_rng(rows)
    taste = random.random((2, rows, 1))
    drawn = random.random((2, rows, words)) ** (0.5 + 2 * taste)
    users, items = (vocabulary * drawn).astype(np.int32)
    ratings = 5 - 4 * np.abs(taste[0] - taste[1])
    return (users, items), ratings.astype(np.float32)


def build(name: str, setup: WorkerSetup, settings: Mapping[str, Any]) -> Workload:
    """Build a built-in model as a workload, placed on several devices if the setup says so."""
    make, batch = MODELS[name]
    sample = partial(batch, **pick(batch, settings))
    if setup.placement in ("", "single"):
        return KerasWorkload(setup, lambda: KerasRecipe(make(**settings), sample))
    places = tower_devices(setup)
    return KerasWorkload(
        setup,
        lambda: KerasRecipe(make(**settings, devices=places), sample),
        partial(placed_step, places),
    )


MODELS: Mapping[str, Any] = {  # name -> (makes the model, makes its batches)
    "keras_maxer": (maxer, maxer_batch),
    "keras_mnist": (mnist, digits),
    "keras_gru": (gru, sine_waves),
    "keras_resnet50": (resnet50, stripes),
    "keras_towers": (towers, reviews),
}
