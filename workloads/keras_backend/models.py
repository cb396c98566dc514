"""The Keras models that ship with evener: classifiers, and a two-tower model for ratings.

The two-tower model predicts ratings from reviews, on one device or two. All data are synthetic. The
registry lists the models' sources.
"""

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
    """Return the network of gpu_maxing_model.py (see the registry) for MNIST.

    It is much larger than needed (78,923,530 parameters), and its training never converges.
    """
    stack = [keras.Input((28, 28, 1))]
    stack += [_convolution_or_pool(each) for each in CONVOLUTIONS]
    stack.append(layers.Flatten())
    stack += [layers.Dense(units, activation="relu") for units in DENSE]
    network = keras.Sequential([*stack, _softmax(10)], name="maxer")
    return _compiled(network, learning_rate, "categorical_crossentropy")


def maxer_batch(rows: int) -> tuple[Any, Any]:
    """Return random grey values 0 to 255 and one-hot labels with MNIST's shapes."""
    x, labels = grey_noise(rows)
    return x, np.eye(10, dtype=np.float32)[labels]


def mnist(filters: int = 16, dense: int = 64, learning_rate: float = 0.001) -> Any:
    """Return a network of two convolutions and two dense layers for MNIST.

    The first convolution has `filters` filters, the second twice as many.
    """
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
    """Return a network of GRUs, a dense layer and a softmax.

    Its step time hardly grows with the batch until the batch is large.
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
    """Return keras.applications.ResNet50 with random weights."""
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
    """Return the devices of the user tower and of the item tower.

    Each tuple has the device of each operation in this order: lookup, convolution, pool, flatten,
    dense.
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
    """Return DeepCoNN, a model with two towers whose outputs' dot product is the rating.

    One tower processes the words of a user's reviews, the other the words of an item's reviews.
    Inputs are (users, items), each (samples, words) of ids; the output is (samples, 1). Each
    layer's weights are on the layer's device. The shared embedding table and its lookups stay on
    the first device, where TensorFlow keeps them.
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
    """Adam that sums the gradient of each embedding row before it updates the row.

    In a group of processes, the exchange sums this gradient anyway. On one device, Keras' own Adam
    would square each contribution separately, and so learn differently. It would also be slower,
    because each operation would process a row for each word of the batch.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply the gradients, converted to dense tensors, with Keras' own Adam.

        `grads` are in the order of the weights.
        """
        dense = [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
        super().apply(dense, trainable_variables)


class AdamInPlace(DenseAdam):
    """Adam that updates each weight on the weight's own device.

    This avoids copies of weights and moments between devices.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Run Keras' own update on the weight's device.

        `variable` is a TensorFlow or Keras variable.
        """
        weight = variable if isinstance(variable, tf.Variable) else variable.value
        with tf.device(weight.device):
            super().update_step(gradient, variable, learning_rate)


def placed_step(places: Sequence[Sequence[str]], model: Any, batch: Any) -> dict[str, Any]:
    """Run Keras' train step with each tower's operations on the devices in `places`.

    The rating is computed on the first device.
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


def call_tower(model: Any, tower: str, places: Sequence[str], flow: Any) -> Any:
    """Return the output of a tower for the input `flow`.

    `places` has the device of each of the tower's operations.
    """
    names = ("words", *(f"{tower}_{kind}" for kind in TOWER))
    for name, device in zip(names, places, strict=True):
        with tf.device(device):
            flow = model.get_layer(name)(flow)
    return flow


def reviews(rows: int, words: int = 800, vocabulary: int = 20_000) -> tuple[Any, Any]:
    """Return ((users, items), ratings) with random word ids.

    `users` and `items` have the shape (rows, words), `ratings` (rows, 1). Ratings from 1 to 5
    follow from the similarity of the user's and the item's words.
    """
    random = np.random.default_rng(rows)
    taste = random.random((2, rows, 1))
    drawn = random.random((2, rows, words)) ** (0.5 + 2 * taste)
    users, items = (vocabulary * drawn).astype(np.int32)
    ratings = 5 - 4 * np.abs(taste[0] - taste[1])
    return (users, items), ratings.astype(np.float32)


def build(name: str, setup: WorkerSetup, settings: Mapping[str, Any]) -> Workload:
    """Build the workload with this name from the registry for the worker `setup`."""
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
