"""Trains programs whose gradient by shares differs, at first or later, and exact ones.

The exact ones are audited in every step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any
from unittest.mock import patch

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from evener.errors import EvenerError
from evener.keras import Split, SplitWarning, make_logical_cpus
from evener.keras.equal_draws import draws_alike
from evener.training import audit
from tests.support.keras_programs import BATCH, Program, programs
from tests.support.keras_proofs import make_plan
from tests.support.keras_twice import seeded, trace_faster

RANDOM = np.random.default_rng(11)
ROWS = 8 * BATCH
X = RANDOM.normal(size=(ROWS, 6))
Y = RANDOM.normal(size=(ROWS, 1))
LABELS = RANDOM.integers(0, 2, (ROWS, 3)).astype(float)
LABELS[-BATCH:][RANDOM.random((BATCH, 3)) < 0.5] = -1.0  # the first batches have none of these


class Mixes(layers.Layer):
    """Mixes a row with the mean of its batch. At first it uses only the row."""

    def __init__(self) -> None:
        super().__init__()
        self.own = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        """Return the mixed rows."""
        return self.own * x + (1 - self.own) * ops.mean(x, axis=0, keepdims=True)


class Lower(keras.callbacks.Callback):
    """Lets rows be mixed after two batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Use half of the mean from here on."""
        if batch == 1:
            self.model.layers[0].own.assign(0.5)


class Admitted(keras.losses.Loss):
    """A mean over the rows whose error is below a threshold."""

    def __init__(self) -> None:
        super().__init__(reduction=None)
        self.threshold = keras.Variable(1e9, dtype="float64", trainable=False, name="threshold")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the mean."""
        errors = ops.mean(ops.square(y_true - y_pred), axis=-1)
        admitted = ops.cast(errors < self.threshold, errors.dtype)
        return ops.sum(admitted * errors) / ops.maximum(ops.sum(admitted), 1.0)


class AdmitFewer(keras.callbacks.Callback):
    """Lowers the threshold after each epoch, so that a batch may lose rows."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set the threshold below most errors."""
        self.model.loss.threshold.assign(0.5)


class Carries(keras.Model):
    """Divides the errors by their earlier values from the fourth step on."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """Return the mean of the divided errors."""
        error = ops.mean(ops.square(y - y_pred))
        loss = error / self.before
        late = ops.cast(self.optimizer.iterations >= 3, error.dtype)
        self.before.assign_add(0.1 * late * (ops.stop_gradient(error) - self.before))
        return loss


class LateContrast(keras.Model):
    """Adds the spread of the outputs from the fourth step on."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """Return the squared error, and later also the spread."""
        late = ops.cast(self.optimizer.iterations >= 3, y_pred.dtype)
        return ops.mean(ops.square(y - y_pred)) + late * ops.std(y_pred)


KEPT: dict[str, Any] = {}  # what a call stores outside the model


class ReadsGlobal(keras.Model):
    """A model whose loss reads a global in which its call stored a value."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(3), layers.Dense(1)

    def call(self, x: Any) -> Any:
        """Return the outputs."""
        KEPT["hidden"] = self.hidden(x)
        return self.out(KEPT["hidden"])

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """Return the squared error and a penalty on the stored value."""
        return ops.mean(ops.square(y - y_pred)) + ops.mean(ops.square(KEPT["hidden"]))


class LeavesEarly(keras.Model):
    """Skips a layer once the mean of a batch's first outputs exceeds its initial value."""

    def __init__(self) -> None:
        super().__init__()
        self.quick, self.deep = layers.Dense(1), layers.Dense(1)

    def call(self, x: Any) -> Any:
        """Return the outputs of one layer, or of two."""
        quick = self.quick(x)
        return tf.cond(
            tf.reduce_mean(quick) > 50.0, lambda: quick, lambda: quick + self.deep(tf.tanh(x))
        )


def leaving() -> Any:
    """Return the model that decides by a mean of the batch."""
    model = LeavesEarly()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model(X[:2])
    return model


def choosing() -> Any:
    """Return the same decision in a functional model."""
    entry = keras.Input((6,))
    quick = layers.Dense(1)(entry)
    deep = layers.Dense(1)(ops.tanh(entry))
    chosen = ops.where(ops.mean(quick) > 50.0, quick, quick + deep)
    model = keras.Model(entry, chosen)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def masked(y: Any, outputs: Any) -> Any:
    """Return a mean over labels that aren't -1."""
    known = tf.cast(y >= 0, outputs.dtype)
    errors = known * tf.square(y - outputs)
    return tf.reduce_sum(errors) / tf.maximum(tf.reduce_sum(known), 1.0)


def dense(loss: Any, outputs: int = 1, base: Any = None, extra: Any = ()) -> Any:
    """Return two layers after `extra`."""
    entry = keras.Input((6,))
    hidden = entry
    for layer in extra:
        hidden = layer(hidden)
    hidden = layers.Dense(4, activation="tanh")(hidden)
    model = (base or keras.Model)(entry, layers.Dense(outputs)(hidden))
    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


def mixing() -> Any:
    """Return a sequential model with mixing."""
    model = keras.Sequential([keras.Input((6,)), Mixes(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def reading() -> Any:
    """Return the model that stores something in a global."""
    model = ReadsGlobal()
    model.compile(keras.optimizers.SGD(0.05))
    model(X[:2])
    return model


def carrying() -> Any:
    """Return a functional model, which already has its weights."""
    model = dense(None, base=Carries)
    model.before = model.add_weight(shape=(), initializer="ones", trainable=False, name="before")
    return model


HIDDEN: dict[str, tuple[Callable[[], Any], Any, list[Any]]] = {
    "a global": (reading, Y, []),
    "rows mixed later": (mixing, Y, [Lower()]),
    "a late term": (lambda: dense(None, base=LateContrast), Y, []),
    "labels of -1 later": (lambda: dense(masked, 3), LABELS, []),
    "a figure carried on": (carrying, Y, []),
    "a threshold that falls": (lambda: dense(Admitted()), Y, [AdmitFewer()]),
    "a decision": (leaving, Y, []),
    "a decision of a functional model": (choosing, Y, []),
}


def find(_rank: int, engine: str, hidden: list[str], exact: list[str]) -> dict[str, Any]:
    """Return the results of the programs in an engine.

    `hidden` ones train as users train them, `exact` ones are audited in every step.
    """
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    if "multiworker" not in engine:
        make_logical_cpus(2)
    split = Split(make_plan(6, 2, micros=(2, 2) if "passes" in engine else None))
    trace_faster()
    found: dict[str, Any] = {name: train(split, *HIDDEN[name]) for name in hidden}
    every = programs()
    # in towers half of the rows are audited, unless a loss can only be computed for all of them
    few: Any = nullcontext()
    if engine == "towers":
        few = patch.multiple("evener.keras.audit", FEW=BATCH // 2, MOST=BATCH // 2)
    with few, patch.object(audit, "is_audited", lambda _: True):
        for name in exact:
            found[name] = Program(name, every[name], 2 * BATCH + 1, False).run(split)
    return found


def look_beside(_rank: int) -> dict[str, Any]:
    """Return the effects of an audit on the model's random draws and normalization, and on another
    thread.

    Also return the message if a user's own `clone_model` reads a split model's compile config.
    """
    make_logical_cpus(2)
    inner = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((3,)), inner])
    model.compile("sgd", "mse")
    other = layers.BatchNormalization()
    rows = tf.constant(np.arange(12.0).reshape(4, 3), tf.float32)
    found: dict[str, Any] = {}

    def look(name: str) -> None:
        drawn = np.asarray(keras.random.normal((4, 3), seed=keras.random.SeedGenerator(1)))
        found[name] = [
            bool(np.allclose(drawn, drawn[:1])),
            bool(np.allclose(inner(rows, training=True), rows, rtol=0.1)),
            bool(np.allclose(other(rows, training=True), rows, rtol=0.1)),
        ]

    with draws_alike(model):
        look("audit")
        thread = Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
    look("after")
    split = Split(devices=["CPU:0", "CPU:1"], ratios=[3, 1], global_batch=4)
    trained = split.build(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        clone_model(trained)
        found["own clone"] = len(seen)
        keras.models.clone_model(trained)
        found["clone"] = len(seen)
    return found


def clone_model(model: Any) -> Any:
    """A user's function with the name of Keras' own."""
    return model.get_compile_config()


def train(split: Split, make: Callable[[], Any], y: Any, callbacks: list[Any]) -> dict[str, Any]:
    """Return the error that ends a training, the number of steps before it, and the warnings."""
    model = seeded(lambda: split.build(make))
    said = ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            model.fit(X, y, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        except EvenerError as error:
            said = str(error)
    warned = [str(each.message) for each in seen if issubclass(each.category, SplitWarning)]
    return {"said": said, "steps": int(model.optimizer.iterations), "warned": warned}
