"""A group of two whose passes run out of memory: what it learns beside one that takes the same
passes from the start.

TensorFlow takes a MemoryError of a function in the graph for its own ResourceExhaustedError.
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
# by rank and step: where, and in which pass from the first try on
Bombs = dict[tuple[int, int], tuple[str, int]]


class Fuse(layers.Layer):
    """Runs out of memory in some passes of this rank; `bombs` are taken out by step."""

    def __init__(self) -> None:
        super().__init__()
        self.bombs: dict[int, tuple[str, int]] = {}
        self.step = -1
        self.seen = {FORWARD: 0, BACKWARD: 0}
        self.rows: list[int] = []  # of the forward passes of this step
        self.most: int | None = None  # rows that fit

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.seen, self.rows = step, {FORWARD: 0, BACKWARD: 0}, []

    def call(self, x: Any, training: bool = False) -> Any:
        """The rows as they are."""

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
    """A split without audits, whose passes would count as those of the step."""
    split = Split(make_plan(*shares, micros=micros))
    split.audited = False
    return split


class Lit(keras.callbacks.Callback):
    """Tells the fuse which step begins; `limits` are rows of a pass from a step on, where nothing
    explodes.
    """

    def __init__(self, fuse: Fuse, limits: dict[int, int] | None = None) -> None:
        super().__init__()
        self.fuse, self.limits = fuse, limits or {}
        self.step = -1
        self.rows: list[list[int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """The next step."""
        self.step += 1
        self.fuse.begin(self.step)
        if self.step in self.limits:
            self.model.fit.hooks.engine.limit.most = self.limits[self.step]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keep the rows of its passes."""
        self.rows.append(self.fuse.rows)

    def on_train_end(self, logs: Any = None) -> None:
        """What comes after is no step."""
        self.fuse.step = -1


class OwnLoss(keras.Model):
    """A compute_loss that counts in a tracker of its own, and adds the layers' losses."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Weighted squares."""
        squares = keras.ops.mean(keras.ops.square(y - y_pred), axis=-1)
        loss = keras.ops.mean(squares * sample_weight) + keras.ops.sum(self.losses)
        self.tracked.update_state(keras.ops.mean(keras.ops.abs(y)))
        return loss


def network(
    fuse: Fuse, *inner: Any, optimizer: Any = None, base: Any = keras.Model, **compiled: Any
) -> Model:
    """Dense layers around a fuse."""
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
    """A loss for each of two outputs, and its figures."""
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
    """Two epochs in order; the history, and the rows of each step's passes in every try."""
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
    """Weights and figures beside one device, where passes have no numbers of their own."""
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
    """Everything beside a training that takes from the same step on the passes that fit in the
    end.
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
    """A loss of its own that counts, at a scale that moves; rows that depend on draws and on one
    another; XLA.
    """
    adamw = optimizers.AdamW(0.01, global_clipnorm=0.1)
    scaled = optimizers.LossScaleOptimizer(adamw, 2.0**17, dynamic_growth_steps=3)
    inner = layers.BatchNormalization(), layers.Dropout(0.4)
    return network(fuse, *inner, optimizer=scaled, base=OwnLoss, jit_compile=True)


def sentence(action: Callable[[], Any]) -> str:
    """What an attempt ends with."""
    try:
        action()
    except EvenerError as error:
        return str(error)
    return ""


class NoRoom(optimizers.SGD):
    """An optimizer that needs more memory than there is."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Nothing is updated."""
        with tf.control_dependencies([tf.numpy_function(self._take, [], tf.int32)]):
            super().update_step(gradient, variable, learning_rate)

    @staticmethod
    def _take() -> Any:
        raise MemoryError


def fit_most(split: Split, rows: int, **words: Any) -> tuple[Model, Fuse]:
    """A model that was fitted where only a few rows fit at once, and its fuse."""
    fuse = Fuse()
    model = seeded(lambda: split.build(lambda: network(fuse, **words)))
    fuse.most = rows
    model.fitted = fit(model, fuse)
    return model, fuse


def grown(split: Split) -> dict[str, Any]:
    """The rows of passes of which three fit, where twice the rows are tried again after two steps;
    then none fits.
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
    """What becomes of a training in one process, and whether the next fit trains."""
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
    """Every case, in a process of a group of two."""
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
