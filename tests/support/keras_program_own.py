"""Models with custom parts that Keras doesn't know.

They have tables, counters, states of a loss, metrics that read attributes or belong to a loss, and
graphs whose rows are joined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.support.keras_program_layers import between
from tests.support.keras_program_losses import VALUES, Made, X

WORDS = (np.abs(X[:, :3] * 4) % 5).astype("int32")


def look_up_bags(table: Any, words: Any, axis: int) -> Any:
    """Return the mean of the rows that each bag of words names, with an axis of length 1.

    TensorFlow reads each row of the table once, so the gradient has one slice for it.
    """
    one_more = tf.sparse.from_dense(words + 1)  # a 0 would be left out
    names = tf.cast(one_more.values - 1, tf.int64)
    bags = tf.SparseTensor(one_more.indices, names, one_more.dense_shape)
    rows = tf.convert_to_tensor(table)
    means = tf.nn.embedding_lookup_sparse(rows, bags, None, combiner="mean")
    return tf.expand_dims(means, axis + 1)


def look_up_twice(table: Any, words: Any, axis: int) -> Any:
    """Return the sum of two look-ups of bags, which share a word."""
    first, second = (look_up_bags(table, bag, axis) for bag in (words[:, :2], words[:, 1:]))
    return first + second


class Table(layers.Layer):
    """A mean of a table's rows, by ops.take, tf.gather or TensorFlow's look-up of bags."""

    def __init__(self, take: Callable[..., Any]) -> None:
        super().__init__()
        self.take = take

    def build(self, shape: Any) -> None:
        """Create the table."""
        self.table = self.add_weight(shape=(5, 4), initializer="random_normal", name="table")

    def call(self, x: Any) -> Any:
        """Return the mean of the rows that x names."""
        return ops.mean(self.take(self.table, x, axis=0), axis=1)


def table(take: Callable[..., Any], optimizer: Callable[..., Any]) -> Made:
    """Return a table before a dense layer."""

    def make() -> Any:
        entry = keras.Input((3,), dtype="int32")
        model = keras.Model(entry, layers.Dense(1)(Table(take)(entry)))
        model.compile(optimizer(0.02), "mse")
        return model

    return make, (WORDS, VALUES, {})


class Ramp(layers.Layer):
    """Warms up by the calls that it counts in TensorFlow's own variable, or only counts rows."""

    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        self.by_rows = by_rows
        self.seen = tf.Variable(0.0, dtype="float64", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the inputs, smaller at first."""
        if training:
            self.seen.assign_add(tf.cast(tf.shape(x)[0] if self.by_rows else 1, self.seen.dtype))
        return x if self.by_rows else x * ops.minimum(1.0, ops.cast(self.seen, x.dtype) / 12.0)


def ramp(by_rows: bool) -> Made:
    """Return a model with a Ramp layer between two dense ones."""

    def make() -> Any:
        middle = [layers.Dense(4), Ramp(by_rows), layers.Dense(1)]
        model = keras.Sequential([keras.Input((X.shape[1],)), *middle])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return make, (X, VALUES, {})


class OwnMetric(keras.Model):
    """compute_metrics reads what call has stored in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = layers.Dense(4, activation="tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        """Return the outputs."""
        self.hidden = self.inner(x)
        return self.out(self.hidden)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the mean of the attribute with the compiled metrics."""
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "hidden": ops.mean(self.hidden)}


class Bounded(layers.Layer):
    """Asserts that inputs are small, by the largest of the batch."""

    def call(self, x: Any) -> Any:
        """Return the inputs."""
        tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), tf.constant(2.0, x.dtype))
        return x


class Extremes(keras.metrics.Metric):
    """Has two results, of which one isn't a mean."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.least = self.add_variable((), "zeros", name="least")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Remember the smallest and the largest output."""
        self.least.assign(ops.minimum(self.least, ops.min(y_pred)))
        self.most.assign(ops.maximum(self.most, ops.max(y_pred)))

    def result(self) -> Any:
        """Return both by name."""
        return {
            "least": ops.convert_to_tensor(self.least),
            "most": ops.convert_to_tensor(self.most),
        }


def extremes() -> Made:
    """Return a model with a metric whose result is a dictionary."""

    def make() -> Any:
        model = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=[Extremes()])
        return model

    return make, (X, VALUES, {})


class OwnTracker(keras.Model):
    """compute_loss calls the model, and counts a value in a metric, by its rows or not."""

    def __init__(self, weighed: bool) -> None:
        super().__init__()
        self.weighed = weighed
        self.out = layers.Dense(1)
        self.errors = keras.metrics.Mean(name="errors")

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the outputs."""
        return self.out(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return a mean error of outputs that are computed again."""
        loss = ops.mean(ops.square(ops.reshape(y, (-1, 1)) - self(x, training=training)))
        self.errors.update_state(loss, sample_weight=ops.shape(x)[0] if self.weighed else None)
        return loss


class OwnStep(keras.Model):
    """A train_step around Keras' own.

    It scales the rows of the batch, adds to the logs, and follows a weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)
        self.slow = self.add_weight(shape=(6, 1), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        """Return the outputs."""
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        """Run Keras' step on scaled rows, and return a metric of theirs."""
        x, y = data
        scaled = x / ops.std(x)
        logs = super().train_step((scaled, y))
        self.slow.assign(0.9 * self.slow + 0.1 * self.out.kernel)
        return {**logs, "rate": self.optimizer.learning_rate, "seen": ops.mean(scaled)}


class OwnGradients(OwnStep):
    """A train_step with its own gradients, which no split may replace."""

    def train_step(self, data: Any) -> Any:
        """Run a step by the signs of the gradients."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        gradients = tape.gradient(loss, list(self.trainable_weights))
        signs = [tf.sign(each) for each in gradients]
        self.optimizer.apply_gradients(zip(signs, self.trainable_weights, strict=True))
        return {"loss": loss}


class OwnPrior(keras.losses.Loss):
    """Keeps a running mean of the labels, by which it divides."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.Variable(1.0, trainable=False, dtype="float64")

    def call(self, y: Any, outputs: Any) -> Any:
        """Return each row's error."""
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(ops.abs(y)))
        return ops.square(y - outputs[:, 0]) / self.mean


class Graph(keras.Model):
    """One layer over the rows that a matrix joins. Its weights are created by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x: Any) -> Any:
        """Return for each row the mean of its neighbours."""
        rows, joined = x
        return ops.matmul(joined, self.out(rows))


def scaled_back() -> Made:
    """Return a model whose outputs are scaled by a value of each row.

    With three rows of three outputs, Keras takes that value for a bias, but only if it knows that
    there are three.
    """

    def make() -> Any:
        entry = keras.Input((6,))
        mean = ops.mean(entry, axis=1, keepdims=True)
        outputs = ops.add(layers.Dense(3)(entry - mean), mean)
        model = keras.Model(entry, outputs)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return make, (X, np.concatenate([VALUES, VALUES**2, -VALUES], 1), {})


def saturated() -> Made:
    """Return probabilities so close to 0 and 1 that only their logits have a gradient."""

    def make() -> Any:
        entry = keras.Input((6,))
        scores = layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.01))(entry)
        model = keras.Model(entry, layers.Softmax()(1e4 * (scores + ops.cumsum(entry[:, :3], 1))))
        model.compile(keras.optimizers.SGD(1e-9), "sparse_categorical_crossentropy")
        return model

    return make, (X, np.arange(len(X)) % 3, {})


def tilted(y: Any, outputs: Any) -> Any:
    """A loss that grows differently once the mean error of the batch is small."""
    errors = tf.square(y - outputs)
    mean = tf.reduce_mean(errors)
    return tf.cond(mean > 0.5, lambda: mean, lambda: tf.reduce_mean(tf.exp(errors)))


def pictures() -> Made:
    """Return a class for each of 8 by 8 points, and one weight per row.

    Keras takes the weights for those of the columns if a batch happens to have as many rows.
    """

    def make() -> Any:
        points = layers.Dense(3, activation="softmax")
        model = keras.Sequential([keras.Input((8, 8, 1)), points])
        model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
        return model

    rows = len(X)
    x = np.linspace(-1, 1, rows * 64).reshape(rows, 8, 8, 1)
    weights = np.linspace(0.5, 2, rows)
    return make, (x, np.arange(rows * 64).reshape(rows, 8, 8) % 3, {"sample_weight": weights})


def subclass(make_model: Callable[[], Any], x: Any = X, loss: Any = "mse") -> Made:
    """Return a model that is built by its first batch."""

    def make() -> Any:
        model = make_model()
        model.compile(keras.optimizers.SGD(0.05), loss() if isinstance(loss, type) else loss)
        return model

    return make, (x, VALUES, {})


def own_programs() -> dict[str, Made]:
    """Return every model by its name."""
    adam, sgd = keras.optimizers.Adam, keras.optimizers.SGD
    rows = len(X)
    joined = np.eye(rows)[:, :8] + 0.1
    return {
        "own table: take, Adam": table(ops.take, adam),
        "own table: gather, Adam": table(tf.gather, adam),
        "own table: take, SGD": table(ops.take, sgd),
        "own table: bags, Adam": table(look_up_bags, adam),
        "own table: bags twice, Adam": table(look_up_twice, adam),
        "own table: take, clipped": table(ops.take, lambda rate: adam(rate, global_clipnorm=0.1)),
        "own assertion": between(Bounded),
        "own counter: calls": ramp(by_rows=False),
        "own counter: rows": ramp(by_rows=True),
        "own metric of an attribute": subclass(OwnMetric),
        "own metric in compute_loss": subclass(lambda: OwnTracker(weighed=False)),
        "own metric in compute_loss, weighed": subclass(lambda: OwnTracker(weighed=True)),
        "own metric of two results": extremes(),
        "own train_step": subclass(OwnStep),
        "own train_step: signs": subclass(OwnGradients),
        "own state of a loss": subclass(OwnMetric, loss=OwnPrior),
        "own weights of pictures": pictures(),
        "own scale of rows": scaled_back(),
        "own saturated outputs": saturated(),
        "own decision of a loss": subclass(OwnMetric, loss=tilted),
        "own graph": subclass(Graph, (X, joined)),
    }
