"""A group of two whose passes run out of memory, compared with one that uses the same passes
throughout.

TensorFlow converts a MemoryError of a function in the graph to its own ResourceExhaustedError.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

from evener.errors import EvenerError
from evener.keras import Split, make_logical_cpus
from evener.keras.equal_draws import rows_alike
from evener.training import passes as pass_limits
from tests.support.keras_proofs import make_plan
from tests.support.keras_twice import (
    difference,
    digest,
    seeded,
    trace_faster,
    train_twice,
    with_variables,
)

RANDOM = np.random.default_rng(3)
BATCH, ROWS = 18, 4 * 18 + 7  # the last batch is short
X = RANDOM.normal(size=(ROWS, 6))
Y = RANDOM.normal(size=(ROWS, 2))
WEIGHTS = RANDOM.uniform(0.5, 2.0, ROWS)
SHARES, MICROS = (12, 6), (6, 3)
FORWARD, BACKWARD = "forward", "backward"

Model = Any
# by rank and step: where, and in which pass, counted from the first attempt
Bombs = dict[tuple[int, int], tuple[str, int]]


class Fuse(layers.Layer):
    """Runs out of memory in some passes of this rank. `bombs` are removed step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.bombs: dict[int, tuple[str, int]] = {}
        self.step = -1
        self.seen = {FORWARD: 0, BACKWARD: 0}
        self.rows: list[int] = []  # of this step's forward passes
        self.most: int | None = None  # maximum number of rows that fit

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step, self.seen, self.rows = step, {FORWARD: 0, BACKWARD: 0}, []

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the rows unchanged."""

        @tf.custom_gradient
        def through(x: Any) -> Any:
            return self._pass(FORWARD, x), lambda flow: self._pass(BACKWARD, flow)

        in_step = training and not tf.executing_eagerly() and not rows_alike.get()
        return through(x) if in_step else x

    def _pass(self, where: str, x: Any) -> Any:
        with tf.control_dependencies(
            [tf.numpy_function(lambda n: self._look(where, n), [tf.shape(x)[0]], tf.int32)]
        ):
            return tf.identity(x)

    def _look(self, where: str, rows: Any) -> Any:
        if self.step < 0:
            return rows
        number = self.seen[where]
        self.seen[where] += 1
        self.rows += [int(rows)] * (where == FORWARD)
        if self.bombs.get(self.step) == (where, number):
            del self.bombs[self.step]
            raise MemoryError
        if self.most is not None and rows > self.most:
            raise MemoryError
        return rows


def unaudited(*shares: int, micros: tuple[int, ...] | None = None) -> Split:
    """Return a split without audits, whose passes would count as those of the step."""
    split = Split(make_plan(*shares, micros=micros))
    split.audited = False
    return split


class Lit(keras.callbacks.Callback):
    """Tells the fuse which step begins.

    `limits` are the rows of a pass from a step on, without failures.
    """

    def __init__(self, fuse: Fuse, limits: dict[int, int] | None = None) -> None:
        super().__init__()
        self.fuse, self.limits = fuse, limits or {}
        self.step = -1
        self.rows: list[list[int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin the next step."""
        self.step += 1
        self.fuse.begin(self.step)
        if self.step in self.limits:
            self.model.fit.hooks.engine.limit.most = self.limits[self.step]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Store the rows of its passes."""
        self.rows.append(self.fuse.rows)

    def on_train_end(self, logs: Any = None) -> None:
        """Stop counting: what follows isn't a step."""
        self.fuse.step = -1


class OwnLoss(keras.Model):
    """A compute_loss that counts in its own tracker, and adds the layers' losses."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return weighted squares."""
        squares = keras.ops.mean(keras.ops.square(y - y_pred), axis=-1)
        loss = keras.ops.mean(squares * sample_weight) + keras.ops.sum(self.losses)
        self.tracked.update_state(keras.ops.mean(keras.ops.abs(y)))
        return loss


def network(
    fuse: Fuse, *inner: Any, optimizer: Any = None, base: Any = keras.Model, **compiled: Any
) -> Model:
    """Return dense layers around a fuse."""
    entry = keras.Input((6,))
    body = layers.Dense(8, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2")(
        entry
    )
    for layer in (*inner, fuse):
        body = layer(body)
    model = base(entry, layers.Dense(2)(body))
    model.tracked = keras.metrics.Mean(name="tracked")
    model.compile(
        optimizer or optimizers.AdamW(0.01, global_clipnorm=0.1), "mse", metrics=["mae"], **compiled
    )
    return model


def two_heads(fuse: Fuse) -> Model:
    """Return a model with a loss for each of two outputs, and metrics."""
    entry = keras.Input((6,))
    body = fuse(layers.Dense(8, activation="tanh")(entry))
    model = keras.Model(
        entry, {name: layers.Dense(size, name=name)(body) for name, size in (("a", 2), ("b", 1))}
    )
    model.compile(
        optimizers.SGD(0.05, momentum=0.9), {"a": "mse", "b": "mae"}, metrics={"a": ["mae"]}
    )
    return with_variables(model, X, {"a": Y, "b": X[:, :1]})


def fit(
    model: Model, fuse: Fuse, limits: dict[int, int] | None = None, y: Any = Y, **words: Any
) -> Any:
    """Train two epochs in order. Return the history, and the rows of each step's passes in every
    attempt.
    """
    lit = Lit(fuse, limits)
    calls = [lit, *words.pop("callbacks", ())]
    options = {
        "batch_size": BATCH,
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
        "callbacks": calls,
        **words,
    }
    data = options.pop("data", None)
    history = (model.fit(X, y, **options) if data is None else model.fit(data, **options)).history
    return history, lit.rows


def beside_one(
    split: Split, make: Callable[[Fuse], Model], bombs: Bombs, **words: Any
) -> dict[str, Any]:
    """Return weights and metrics compared with one device, if passes have no metrics of
    their own.
    """
    rank, fuse = split.required_group.rank, Fuse()
    rows: list[Any] = []

    def run(model: Model) -> Any:
        hooked = hasattr(model.fit, "hooks")
        fuse.bombs = (
            {step: bomb for (who, step), bomb in bombs.items() if who == rank} if hooked else {}
        )
        history, own = fit(model, fuse, **words)
        rows.append(own)
        return {
            name: figures for name, figures in history.items() if name not in ("a_loss", "b_loss")
        }

    found = train_twice(split, lambda: make(fuse), run, traced=True)
    return found | {"rows": rows[0], "left": len(fuse.bombs)}


def beside_same(
    split: Split, make: Callable[[Fuse], Model], bombs: Bombs, **words: Any
) -> dict[str, Any]:
    """Return everything compared with a training that uses the final passes from the
    same step on.
    """
    rank, fuse = split.required_group.rank, Fuse()
    many = seeded(lambda: split.build(lambda: make(fuse)))
    fuse.bombs = {step: bomb for (who, step), bomb in bombs.items() if who == rank}
    said = StringIO()
    with redirect_stderr(said):
        history, rows = fit(many, fuse, **words)
    other = Fuse()
    calm = seeded(lambda: split.build(lambda: make(other)))
    own = sorted(step for who, step in bombs if who == rank)
    limits = {step: MICROS[rank] >> (n + 1) for n, step in enumerate(own)}
    beside, _ = fit(calm, other, limits, **words)
    states = [
        [
            each.numpy().astype(float)
            for each in (*model.non_trainable_variables, *model.optimizer.variables)
        ]
        for model in (calm, many)
    ]
    return {
        "weights": difference(calm.get_weights(), many.get_weights()),
        "states": difference(*states),
        "logs": difference(beside, history),
        "learned": digest(many),
        "left": len(fuse.bombs),
        "said": said.getvalue().splitlines(),
        "rows": rows,
    }


def everything(fuse: Fuse) -> Model:
    """Return a model with a counting loss at a dynamic scale, with random and dependent rows, under
    XLA.
    """
    adamw = optimizers.AdamW(0.01, global_clipnorm=0.1)
    scaled = optimizers.LossScaleOptimizer(adamw, 2.0**17, dynamic_growth_steps=3)
    inner = layers.BatchNormalization(), layers.Dropout(0.4)
    return network(fuse, *inner, optimizer=scaled, base=OwnLoss, jit_compile=True)


def sentence(action: Callable[[], Any]) -> str:
    """Return the error that ends an attempt."""
    try:
        action()
    except EvenerError as error:
        return str(error)
    return ""


class NoRoom(optimizers.SGD):
    """An optimizer that needs more memory than there is."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update nothing."""
        with tf.control_dependencies([tf.numpy_function(self._take, [], tf.int32)]):
            super().update_step(gradient, variable, learning_rate)

    @staticmethod
    def _take() -> Any:
        raise MemoryError


def fit_most(split: Split, rows: int, **words: Any) -> tuple[Model, Fuse]:
    """Return a model that was fitted with memory for only a few rows, and its fuse."""
    fuse = Fuse()
    model = seeded(lambda: split.build(lambda: network(fuse, **words)))
    fuse.most = rows
    model.fitted = fit(model, fuse)
    return model, fuse


def grown(split: Split) -> dict[str, Any]:
    """Return the rows of passes if three fit, twice the rows are tried after two steps, and then
    none fits.
    """
    pass_limits.CLEAN_STEPS, before = 2, pass_limits.CLEAN_STEPS
    try:
        model, fuse = fit_most(split, 3)
    finally:
        pass_limits.CLEAN_STEPS = before
    _, rows = model.fitted
    fuse.most, steps = 0, int(model.optimizer.iterations)
    never = sentence(lambda: fit(model, fuse))
    return {"rows": rows[:6], "never": never, "steps": int(model.optimizer.iterations) - steps}


def towers(_rank: int) -> dict[str, Any]:
    """Return the result of a training in one process, and whether the next fit trains."""
    warnings.simplefilter("ignore")
    make_logical_cpus(2)
    trace_faster()
    fuse = Fuse()
    model = unaudited(*SHARES).build(lambda: network(fuse))
    fuse.bombs = {2: (BACKWARD, 0)}
    try:
        fit(model, fuse)
        said = ""
    except tf.errors.ResourceExhaustedError as error:
        said = type(error).__name__
    before = int(model.optimizer.iterations)
    fit(model, fuse)
    return {"said": said, "trained": int(model.optimizer.iterations) - before}


def prove(_rank: int, folder: str) -> dict[str, Any]:
    """Return every case, in a process of a group of two."""
    os.environ |= {"XDG_STATE_HOME": folder, "EVENER_RUN": "20261122-120000-abc1"}
    warnings.simplefilter("ignore")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    trace_faster()
    split = unaudited(*SHARES, micros=MICROS)
    anywhere: Bombs = {
        (1, 0): (FORWARD, 0),
        (0, 1): (BACKWARD, 0),
        (0, 3): (BACKWARD, 3),
        (1, 4): (FORWARD, 0),
    }
    late: Bombs = {(0, 0): (BACKWARD, 1), (1, 2): (BACKWARD, 1)}
    batches = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(BATCH)
    with redirect_stderr(StringIO()):
        heads = beside_one(split, two_heads, anywhere, y={"a": Y, "b": X[:, :1]})
    found: dict[str, Any] = {
        "two heads": heads,
        "everything": beside_same(split, everything, late, data=batches),
    }
    with redirect_stderr(StringIO()):
        found["grown"] = grown(split)
        found["update"] = sentence(lambda: fit_most(split, 99, optimizer=NoRoom()))
        found["at once"] = sentence(lambda: fit_most(unaudited(*SHARES), 3))
    return found
