"""Ratings from reviews: a tower over the user's words, one over the item's, and their product; on one device or two.

Source: aistein/dlprof, "DeepCoNN - dual gpu": 800 words of a user's reviews and of an item's, one table of word
embeddings (50), and in each tower Conv1D (10 filters of 3, tanh), max-pool (2, stride 1), flatten, Dense 64 relu; the
rating is the sum of the products of the towers' 64. The reviews are made in code. Its placements: `single`; `towers`,
one on each device; `alternate`, each operation on the other device than the one before. The table stays on the first
device, and so do the lookups, as TensorFlow keeps them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evener.errors import RequestError

from ..protocol import Place, Workload
from .step_engines import SingleDeviceEngine
from .workload import KerasWorkload

PLACEMENTS = ("single", "towers", "alternate")
TOWERS = ("user", "item")


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `vocabulary`, `words`, `embedding`, `filters`, `kernel`, `dense`, ..."""
    check(settings)
    batch = partial(reviews, words=settings["words"], vocabulary=settings["vocabulary"])
    if place.placement in ("", "single"):
        return KerasWorkload(place, partial(model, **settings), batch)
    return KerasWorkload(place, partial(model, **settings, devices=tower_devices(place)), batch, PlacedEngine(place))


def check(settings: Mapping[str, Any]) -> None:
    """RequestError for sizes that make no model."""
    for key in ("vocabulary", "words", "embedding", "filters", "kernel", "dense"):
        if settings[key] < 1:
            raise RequestError(f"keras_towers can't have {key}={settings[key]}.", "Give 1 or more.")
    if settings["words"] <= settings["kernel"]:
        raise RequestError(
            f"keras_towers can't have kernel={settings['kernel']} over words={settings['words']}.", "Give more words."
        )


def tower_devices(place: Place) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The device of each operation (lookup, convolution, pool, flatten, dense) of the user's tower and the item's."""
    if place.placement not in PLACEMENTS:
        raise RequestError(
            f"There is no placement {place.placement!r}.", f"Choose {', '.join(PLACEMENTS[:-1])} or {PLACEMENTS[-1]}."
        )
    if place.xla:
        raise RequestError("XLA can't compile a step over several devices.", "Leave --xla out for a placement.")
    if len(place.devices) < 2:
        raise RequestError(f"The placement {place.placement} needs two devices.", "Name two with --devices.")
    first, second = place.devices[:2]
    if place.placement == "towers":
        return (first,) * 5, (first, *(second,) * 4)
    return (first, second, first, second, first), (first, first, second, first, second)


def model(
    vocabulary: int = 20_000,
    words: int = 800,
    embedding: int = 50,
    filters: int = 10,
    kernel: int = 3,
    dense: int = 64,
    learning_rate: float = 0.0001,
    devices: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
) -> Any:
    """Inputs (users, items), each (samples, words) of ids; output (samples, 1); each layer's weights on its device."""
    layers = keras.layers
    table = layers.Embedding(vocabulary, embedding, name="words")
    inputs, ends = [], []
    for name, places in zip(TOWERS, devices or ((None,) * 5,) * 2, strict=True):
        tower = [
            table,
            layers.Conv1D(filters, kernel, activation="tanh", name=f"{name}_conv"),
            layers.MaxPooling1D(2, strides=1, name=f"{name}_pool"),
            layers.Flatten(name=f"{name}_flat"),
            layers.Dense(dense, activation="relu", name=f"{name}_dense"),
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
    """Adam on the sum of what each word contributes to its row of the table, as a group of processes has it too.

    Keras' own squares the contributions of a sparse gradient one by one: one device would then neither learn what a
    group learns, nor be as quick, as it keeps a row for each word of the batch through every operation.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keras' own, on dense gradients; they come in the order of the weights."""
        super().apply([None if each is None else tf.convert_to_tensor(each) for each in grads], trainable_variables)


class AdamInPlace(DenseAdam):
    """Adam that updates each weight on its own device, so that neither the weight nor its moments move."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Keras' own step, on the device of the weight, which comes as a variable of TensorFlow's or of Keras'."""
        weight = variable if isinstance(variable, tf.Variable) else variable.value
        with tf.device(weight.device):
            super().update_step(gradient, variable, learning_rate)


class PlacedEngine(SingleDeviceEngine):
    """The towers' operations on the devices of the placement, each with its gradient; the rating on the first."""

    name = "placed"

    def attach(self, model: Any, sample: Any) -> None:
        """Trace the step once, for any number of rows."""
        devices = tower_devices(self.place)
        self._towers = [stages(model, name, places) for name, places in zip(TOWERS, devices, strict=True)]
        super().attach(model, sample)

    def spans(self, shares: tuple[int, ...], micro: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
        """Every device sees every sample."""
        if micro:
            raise RequestError("A placement computes its batch in one pass.", "Leave --micro out.")
        return ((0, sum(shares)),)

    def train(self, batch: Any) -> Any:
        """The traced step."""
        model, (x, y) = self.model, batch
        loss, pairs = self.gradients(x, y)
        variables = model.trainable_variables
        totals = added(pairs, [variable.value for variable in variables])
        model.optimizer.apply_gradients(zip(totals, variables, strict=True))
        return {"loss": loss}

    def gradients(self, x: Sequence[Any], y: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        """The loss, and each weight with a part of its gradient."""
        model = self.model
        passes = [StagedPass(tower, words) for tower, words in zip(self._towers, x, strict=True)]
        ends = [each.output for each in passes]
        with tf.device(self.devices[0]):
            with tf.GradientTape() as tape:
                tape.watch(ends)
                loss = model.compute_loss(x=x, y=y, y_pred=model.get_layer("rating")(ends))
                scaled = model.optimizer.scale_loss(loss)
            flows = tape.gradient(scaled, ends)
        pairs = [pair for each, flow in zip(passes, flows, strict=True) for pair in each.gradients(flow)]
        return loss, pairs


def stages(model: Any, tower: str, places: tuple[str, ...]) -> list[Stage]:
    """A tower's operations with their devices and weights."""
    names = ("words", f"{tower}_conv", f"{tower}_pool", f"{tower}_flat", f"{tower}_dense")
    layers = [model.get_layer(name) for name in names]
    return [
        Stage(device, layer, tuple(variable.value for variable in layer.trainable_variables))
        for layer, device in zip(layers, places, strict=True)
    ]


def reviews(rows: int, words: int = 800, vocabulary: int = 20_000) -> tuple[Any, Any]:
    """((users, items), ratings): ids (rows, words), and (rows, 1) from 1 to 5 by how similar their words are."""
    random = np.random.default_rng(rows)
    taste = random.random((2, rows, 1))
    ids = (vocabulary * random.random((2, rows, words)) ** (0.5 + 2 * taste)).astype(np.int32)
    ratings = 5 - 4 * np.abs(taste[0] - taste[1])
    return (ids[0], ids[1]), ratings.astype(np.float32)


Tensor = Any  # tf.Tensor; TensorFlow is not typed
Variable = Any  # tf.Variable


@dataclass(frozen=True)
class Stage:
    """Some operations of the model: `call` maps a tensor to a tensor on `device`, using `variables`."""

    device: str
    call: Callable[[Tensor], Tensor]
    variables: tuple[Variable, ...] = ()


class StagedPass:
    """A forward pass through a chain of stages, and the backward pass through it."""

    def __init__(self, stages: Sequence[Stage], inputs: Tensor) -> None:
        self._steps: list[tuple[Stage, Any, Tensor, Tensor]] = []
        for stage in stages:
            with tf.device(stage.device), tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(list(stage.variables))
                if inputs.dtype.is_floating:
                    tape.watch(inputs)
                output = stage.call(inputs)
            self._steps.append((stage, tape, inputs, output))
            inputs = output
        self.output = inputs

    def gradients(self, of_output: Tensor) -> Iterator[tuple[Variable, Tensor]]:
        """Each variable with its gradient, last stage first, given the gradient of the output."""
        for stage, tape, inputs, output in reversed(self._steps):
            with tf.device(stage.device):
                to_inputs = inputs.dtype.is_floating
                sources = [*([inputs] if to_inputs else []), *stage.variables]
                found = tape.gradient(output, sources, output_gradients=of_output)
            if to_inputs:
                of_output = found.pop(0)
            yield from zip(stage.variables, found, strict=True)


def added(pairs: Sequence[tuple[Variable, Tensor]], variables: Sequence[Variable]) -> list[Tensor]:
    """The gradient of each variable: the sum of its parts, on the variable's own device."""
    parts: dict[Any, list[Tensor]] = {variable.ref(): [] for variable in variables}
    for variable, gradient in pairs:
        parts[variable.ref()].append(gradient)
    totals = []
    for variable in variables:
        with tf.device(variable.device):
            totals.append(tf.add_n(parts[variable.ref()]))
    return totals
