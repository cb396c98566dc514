"""Validations and evaluations of a plan in passes, compared with those of plain Keras.

The models are in float64. Batches of 8 rows are shared 6 : 2, in passes of two rows, and validation
has 13 rows, so its last batch is short. Each value depends on how rows are put into batches: sums
over a batch, deviations within one, and single outputs' losses, which Keras averages over batches.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from evener.keras import Split, make_logical_cpus
from tests.support.keras_proofs import make_plan
from tests.support.keras_twice import difference, seeded, trace_faster

RANDOM = np.random.default_rng(11)
BATCH, ROWS, HELD = 8, 16, 13
MICRO = 2
X = RANDOM.normal(size=(ROWS + HELD, 4))
Y = RANDOM.normal(size=(ROWS + HELD, 1))
KINDS = RANDOM.integers(0, 3, ROWS + HELD)
WORDS = np.where(
    np.arange(5) < RANDOM.integers(1, 6, (ROWS + HELD, 1)),
    RANDOM.integers(1, 9, (ROWS + HELD, 5)),
    0,
)
SUM = "sum"

Model = Any


def deviation(y: Any, outputs: Any) -> Any:
    """Return a function of the whole batch."""
    return ops.std(y - outputs)


class Watched(layers.Layer):
    """Returns its input. It counts the rows of calls, and tracks the mean and largest input.

    `seen` has the rows of each call outside of training.
    """

    def __init__(self) -> None:
        super().__init__(name="watched")
        self.seen: list[int] = []
        self.mean = keras.metrics.Mean("mean")

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the input."""
        self.mean.update_state(x)
        self.add_loss(0.1 * ops.sum(x**2))
        if training or not tf.is_symbolic_tensor(x):
            return x
        return tf.ensure_shape(tf.numpy_function(self._note, [x], x.dtype), [None, 4])

    def _note(self, x: Any) -> Any:
        self.seen.append(len(x))
        return x


class Coded(keras.Model):
    """A model whose loss reads what its call has left in attributes, as that of an autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(3)
        self.second = layers.Dense(1)
        self.code: Any = None

    def call(self, x: Any) -> Any:
        """Return the second layer's outputs, and keep the first's."""
        self.code = self.first(x)
        self.size = ops.sum(self.code**2)
        return self.second(self.code)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return a sum over the rows."""
        return ops.sum((y - y_pred) ** 2) + 0.1 * ops.sum(ops.abs(self.code)) + 0.1 * self.size


def summed() -> Model:
    """Return a model with a loss that sums over a batch."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l2"),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", keras.losses.MeanSquaredError(SUM), metrics=["mae", deviation])
    return model


def watched() -> Model:
    """Return a model with a layer that adds a loss and has a metric."""
    model = keras.Sequential([keras.Input((4,)), Watched(), layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError(SUM), metrics=[deviation])
    return model


def coded() -> Model:
    """Return a model whose loss reads attributes."""
    model = Coded()
    model.compile("sgd", metrics=[deviation])
    model(X[:1])
    return model


def two_heads() -> Model:
    """Return a model with losses of single outputs, one of probabilities with their logits."""
    entry = keras.Input((4,))
    kind = layers.Dense(3, activation="softmax", name="kind")(40 * entry)
    model = keras.Model(entry, {"size": layers.Dense(1, name="size")(entry), "kind": kind})
    model.compile(
        "sgd",
        {"size": "mse", "kind": "sparse_categorical_crossentropy"},
        metrics={"size": [deviation], "kind": ["accuracy"]},
    )
    return model


def masked() -> Model:
    """Return a model of padded words, whose loss is a mean over the words of a batch."""
    model = keras.Sequential(
        [keras.Input((5,)), layers.Embedding(9, 4, mask_zero=True), layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    return model


class OwnStep(keras.Sequential):
    """A model with a test step of its own, which towers run on the whole batch."""

    def test_step(self, data: Any) -> Any:
        """Return the compiled losses and metrics."""
        return super().test_step(data)


class Counts(keras.callbacks.Callback):
    """Counts the batches of evaluations."""

    batches = 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self.batches += 1


def count_own_steps(split: Split) -> int:
    """Return the number of batches in which a model's own test step evaluates a batch of a plan."""

    def make() -> Model:
        model = OwnStep([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    counts = Counts()
    split.build(make).evaluate(X[:BATCH], Y[:BATCH], verbose=0, callbacks=[counts])
    return counts.batches


def validate(model: Model, y: Any) -> dict[str, Any]:
    """Return the values of a training with validation, by arrays and by single samples."""
    held = keras.tree.map_structure(lambda rows: rows[ROWS:], (X, y))
    learned = keras.tree.map_structure(lambda rows: rows[:ROWS], (X, y))
    fitted = model.fit(
        *learned, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=held
    )
    return fitted.history | {"later": evaluate(model, held)}


def evaluate(model: Model, held: Any) -> list[Any]:
    """Return the values of evaluations of arrays without a batch size, and of a batch.

    The second evaluation has a last batch of one row, which leaves the second device without rows.
    """
    size = None if hasattr(model.fit, "hooks") else BATCH
    first = keras.tree.map_structure(lambda rows: rows[: BATCH + 1], held)
    return [
        model.evaluate(*held, batch_size=size, verbose=0, return_dict=True),
        model.evaluate(*first, batch_size=BATCH, verbose=0, return_dict=True),
        model.test_on_batch(*first, return_dict=True),
    ]


CASES: dict[str, tuple[Callable[[], Model], Callable[[Model], Any]]] = {
    "a sum over the batch": (summed, lambda model: validate(model, Y)),
    "a layer's own loss and metric": (watched, lambda model: validate(model, Y)),
    "attributes": (coded, lambda model: validate(model, Y)),
    "single outputs": (two_heads, lambda model: validate(model, {"size": Y, "kind": KINDS})),
    "a mask": (
        masked,
        lambda model: evaluate(model, (WORDS[ROWS:], np.cos(WORDS[ROWS:])[..., None])),
    ),
}


def prove(_: int, engine: str) -> dict[str, Any]:
    """Return the largest differences of values, and what several processes have to agree on."""
    warnings.simplefilter("ignore")
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    if engine == "towers":
        make_logical_cpus(2)
    trace_faster()
    split = Split(make_plan(6, 2, micros=(MICRO, MICRO)))
    found: dict[str, Any] = {}
    for name, (make, run) in CASES.items():
        one, many = seeded(make), seeded(partial(split.build, make))
        values = run(many)
        found[name] = {"values": values, "apart": difference(run(one), values)}
        if make is watched:
            seen = many.get_layer("watched").seen
            seen.clear()  # the first evaluation is audited, by steps without passes
            many.evaluate(X, Y, verbose=0)
            found[name]["most rows"] = max(seen)
    if engine == "towers":
        found["own steps"] = count_own_steps(split)
    return found
