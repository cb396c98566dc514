"""Models with layers that keep states, add losses, look across rows or aren't reached by
the loss.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.support.keras_program_losses import KINDS, ROWS, VALUES, Made, X


class Added(layers.Layer):
    """Adds a loss of its inputs, selected by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def call(self, x: Any) -> Any:
        """Return the inputs unchanged."""
        squares = ops.sum(ops.square(x), axis=-1)
        if self.kind == "mean":
            self.add_loss(0.1 * ops.mean(squares))
        elif self.kind == "sum":
            self.add_loss(0.1 * ops.sum(squares))
        elif self.kind == "rows":
            self.add_loss(0.1 * squares)
        elif self.kind == "balance":  # for experts: a product of two means
            share = ops.softmax(x)
            self.add_loss(
                0.1 * ops.sum(ops.mean(share, 0) * ops.mean(ops.cast(share > 0.3, x.dtype), 0))
            )
        elif self.kind == "weight":  # no row counts
            self.add_loss(ops.cast(0.1, x.dtype))
        return x


class State(layers.Layer):
    """Assigns a state when it is called, selected by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def build(self, shape: Any) -> None:
        """Create the state."""
        whole = self.kind in ("steps", "rows")
        size = () if whole or self.kind in ("float steps", "slow mean") else (shape[-1],)
        self.state = self.add_weight(
            shape=size,
            dtype="int64" if whole else None,
            trainable=False,
            initializer="zeros",
            name="state",
        )

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the inputs, from which some kinds subtract the state."""
        kind, state = self.kind, self.state
        if not training:
            return x
        mean = ops.mean(x, 0)
        if kind in ("steps", "float steps"):
            state.assign(state + 1)
            return x * ops.cast(1 + 0.01 * ops.cast(state, x.dtype), x.dtype)
        if kind == "rows":
            state.assign(state + ops.cast(ops.shape(x)[0], "int64"))
        elif kind == "slow mean":
            state.assign(0.9 * state + 0.1 * ops.mean(x))
        elif kind == "sums":
            state.assign(state + ops.sum(x, 0))
        elif kind == "codebook":
            state.assign(0.9 * state + 0.1 * ops.sum(x, 0))
        elif kind == "largest":
            state.assign(ops.maximum(state, ops.max(x, 0)))
        elif kind == "own normalization":
            state.assign(0.9 * state + 0.1 * mean)
            return x - mean
        elif kind == "centre":  # used, and a mean over rows
            state.assign(0.9 * state + 0.1 * mean)
        return x


class Across(layers.Layer):
    """Looks across the rows of a batch."""

    def call(self, x: Any) -> Any:
        """Return the inputs minus the batch's mean."""
        return x - ops.mean(x, 0, keepdims=True)


class Counted(layers.Layer):
    """Counts its calls in TensorFlow's own variable, and adds noise that TensorFlow draws."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)

    def call(self, x: Any) -> Any:
        """Return the inputs with a little noise, which is never the same."""
        self.calls.assign_add(1)
        return x + 0.0 * tf.random.normal(tf.shape(x), dtype=x.dtype)


class Watched(layers.Layer):
    """Updates a metric in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        """Return the inputs."""
        self.seen.update_state(x)
        return x


def between(*extra: Any, optimizer: Any = None, loss: Any = "mse", **words: Any) -> Made:
    """Return a model with these layers between dense ones; each is created anew by its function."""

    def make() -> Any:
        inner = [each() for each in extra]
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, activation="tanh"), *inner, layers.Dense(1)]
        )
        model.compile(optimizer() if optimizer else keras.optimizers.Adam(0.02), loss, **words)
        return model

    return make, (X, VALUES, {})


class Pooled(keras.Model):
    """Has a pooler and a head that the loss doesn't reach, as many encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = layers.Dense(5, activation="tanh"), layers.Dense(4)
        self.head, self.unused = layers.Dense(1), layers.Dense(3)

    def call(self, x: Any) -> Any:
        """Return two outputs, and compute a third that isn't used."""
        body = self.body(x)
        self.unused(body)
        return {"value": self.head(body), "pooled": self.pooler(body)}


def pooled(optimizer: Any) -> Made:
    """Return weights without a gradient, under this optimizer."""

    def make() -> Any:
        model = Pooled()
        model.compile(optimizer(), {"value": "mse", "pooled": None})
        return model

    return make, (X, {"value": VALUES, "pooled": np.zeros((ROWS, 4))}, {})


def stopped(optimizer: Any) -> Made:
    """Return a layer behind stop_gradient, and weights that are decayed if they have a gradient."""

    def make() -> Any:
        entry = keras.Input((6,))
        frozen = layers.Lambda(ops.stop_gradient, output_shape=(5,))(layers.Dense(5)(entry))
        model = keras.Model(entry, layers.Dense(1)(frozen))
        model.compile(optimizer(), "mse")
        return model

    return make, (X, VALUES, {})


def unreachable() -> Made:
    """Return a model in which no weight has a gradient."""

    def make() -> Any:
        entry = keras.Input((6,))
        model = keras.Model(
            entry, layers.Lambda(ops.stop_gradient, output_shape=(1,))(layers.Dense(1)(entry))
        )
        model.compile("sgd", "mse")
        return model

    return make, (X, VALUES, {})


def shaped(kind: str) -> Made:
    """Return outputs whose first axis isn't the rows, or that are complex; or rows that aren't
    rows.
    """

    def make() -> Any:
        entry = keras.Input((6,))
        hidden = layers.Dense(4)(entry)
        ends = {
            "columns first": lambda: layers.Lambda(lambda h: tf.transpose(h), output_shape=(None,))(
                hidden
            ),
            "rows and rows": lambda: layers.Lambda(
                lambda h: tf.reshape(h, [-1, 2]), output_shape=(2,)
            )(hidden),
            "similarities": lambda: layers.Lambda(
                lambda h: h @ tf.transpose(h), output_shape=(None,)
            )(hidden),
            "complex": lambda: layers.Lambda(
                lambda h: tf.complex(h[:, :2], h[:, 2:]), dtype="float64"
            )(hidden),
        }

        def loss(y: Any, outputs: Any) -> Any:
            return tf.reduce_mean(tf.abs(outputs) ** 2) + 0.0 * tf.reduce_mean(
                tf.cast(y, tf.float64)
            )

        class Own(keras.Model):
            """A model whose loss uses the outputs unchanged."""

            def compute_loss(
                self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
            ) -> Any:
                """Return a loss of all numbers."""
                return loss(y, y_pred)

        model = Own(entry, ends[kind]())
        model.compile("sgd")
        return model

    return make, (X, VALUES, {})


def graph() -> Made:
    """Return a model whose batch is the whole graph: features and neighbours of its nodes."""

    def make() -> Any:
        nodes, edges = keras.Input((6,)), keras.Input((None,))
        mixed = layers.Lambda(lambda pair: pair[1] @ pair[0], output_shape=(6,))([nodes, edges])
        model = keras.Model([nodes, edges], layers.Dense(1)(mixed))
        model.compile("sgd", "mse")
        return model

    return make, ([X[:8], np.eye(8)], VALUES[:8], {})


def layer_programs() -> dict[str, Made]:
    """Return every model by its name."""
    adamw = lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1)  # noqa: E731
    ftrl = lambda: keras.optimizers.Ftrl(0.05)  # noqa: E731
    clipped = lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.1)  # noqa: E731
    states = ("steps", "float steps", "rows", "slow mean", "sums", "centre", "codebook", "largest")
    return {
        **{
            f"add_loss: {kind}": between(lambda kind=kind: Added(kind))
            for kind in ("mean", "sum", "rows")
        },
        **{
            f"add_loss: {kind}": between(lambda kind=kind: Added(kind))
            for kind in ("balance", "weight")
        },
        "add_loss: mean, with a sum": between(
            lambda: Added("mean"), loss=keras.losses.MeanSquaredError("sum")
        ),
        "activity and weight regularizers": between(
            lambda: layers.Dense(5, activity_regularizer="l2", kernel_regularizer="l1"),
            optimizer=clipped,
        ),
        **{f"state: {kind}": between(lambda kind=kind: State(kind)) for kind in states},
        **{
            f"regularized, state: {kind}": between(
                lambda: layers.Dense(5, kernel_regularizer="l2"), lambda kind=kind: State(kind)
            )
            for kind in ("rows", "largest")
        },
        "state: own normalization": between(lambda: State("own normalization")),
        "looks across rows": between(Across),
        "BatchNormalization": between(layers.BatchNormalization),
        "LayerNormalization, AdamW": between(layers.LayerNormalization, optimizer=adamw),
        "Dropout": between(lambda: layers.Dropout(0.5)),
        "Dropout, GaussianNoise, a state": between(
            lambda: layers.Dropout(0.3), lambda: layers.GaussianNoise(0.3), lambda: State("steps")
        ),
        "TensorFlow's variable and noise": between(Counted),
        "a metric in a layer": between(Watched),
        "SpectralNormalization": between(lambda: layers.SpectralNormalization(layers.Dense(5))),
        "pooler, AdamW": pooled(adamw),
        "pooler, Adam": pooled(lambda: keras.optimizers.Adam(0.02)),
        "pooler, Ftrl": pooled(ftrl),
        "pooler, momentum": pooled(lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        "stopped, AdamW": stopped(adamw),
        "nothing has a gradient": unreachable(),
        **{
            f"outputs: {kind}": shaped(kind)
            for kind in ("columns first", "rows and rows", "similarities", "complex")
        },
        "full graph": graph(),
        "crossentropy, two steps a call": between(loss="mse", steps_per_execution=2),
        "accumulation": between(
            optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        ),
    }


RANDOM_LAYERS = ("Dropout", "Dropout, GaussianNoise, a state")  # no two devices draw the same
assert len(KINDS) == ROWS
