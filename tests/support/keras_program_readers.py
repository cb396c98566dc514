"""Models whose loss reads more than outputs.

It reads tensors that a call has stored in attributes, weights, and the model itself, which it calls
again. Losses of layers that are 0 at first are here too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.support.keras_program_losses import VALUES, Made, X


class Keeps(layers.Layer):
    """Stores what it computes in an attribute, a list, a dict and a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(3, activation="tanh")
        self.maps: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.seen = SimpleNamespace(outer=None)

    def call(self, x: Any) -> Any:
        """Return the inner layer's outputs."""
        kept = self.inner(x)
        self.maps.clear()
        self.maps.append(ops.square(kept))
        self.maps.append(ops.expand_dims(kept, 1))
        self.by_name["pair"] = (kept, ops.cast(kept > 0, "int32"))
        self.seen.outer = ops.exp(kept)
        return kept


class Reader(keras.Model):
    """Two layers; `read` computes a loss from the model, x, y and its outputs."""

    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        self.read = read
        self.hidden = Keeps()
        self.out = layers.Dense(1)
        self.log_scale = self.add_weight(shape=(), initializer="zeros", name="log_scale")

    def call(self, x: Any) -> Any:
        """Return the outputs, and store some values in attributes."""
        self.hidden_rows = self.hidden(x)
        self.mean = ops.mean(self.hidden_rows, axis=0)
        self.total = ops.sum(ops.square(self.hidden_rows))
        return self.out(self.hidden_rows)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return the squared error, and what is read."""
        return ops.mean(ops.square(y - y_pred)) + self.read(self, x, y, y_pred)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the mean error."""
        return {"error": ops.mean(ops.abs(y - y_pred)), "loss": self._loss_tracker.result()}


def rows(model: Any, *_: Any) -> Any:
    """Return a KL term of a latent in an attribute."""
    return 0.3 * ops.mean(ops.sum(ops.square(model.hidden_rows), axis=1))


def containers(model: Any, *_: Any) -> Any:
    """Return a value from a list, a dict and an object of an inner layer."""
    hidden = model.hidden
    kept, signs = hidden.by_name["pair"]
    figures = (
        hidden.maps[0] + hidden.maps[1][:, 0] * ops.cast(signs, kept.dtype) + hidden.seen.outer
    )
    return 0.2 * ops.mean(figures * kept)


def figures(model: Any, *_: Any) -> Any:
    """Return means and sums over rows, as they are stored."""
    return ops.sum(model.mean) + 0.01 * model.total


def kernels(model: Any, *_: Any) -> Any:
    """Return a penalty on a kernel, and a learned uncertainty."""
    return 0.1 * ops.sum(ops.square(model.hidden.inner.kernel)) + ops.exp(model.log_scale)


def tied(model: Any, x: Any, *_: Any) -> Any:
    """Return a decoder with the encoder's kernel."""
    inner = model.hidden.inner
    return 0.1 * ops.mean(ops.square(inner(x) @ ops.transpose(inner.kernel) - x))


def again(model: Any, x: Any, _y: Any, outputs: Any) -> Any:
    """Return a second view of the same rows."""
    return ops.mean(ops.square(model(x + 0.1, training=True) - outputs))


def penalty(model: Any, x: Any, *_: Any) -> Any:
    """Return the gradient of the outputs with respect to the inputs."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x, training=True)
    return 0.1 * ops.mean(ops.square(ops.norm(tape.gradient(outputs, x), axis=1) - 1.0))


def reader(read: Callable[..., Any]) -> Made:
    """Return a Reader whose loss is computed by `read`."""

    def make() -> Any:
        model = Reader(read)
        model.compile(keras.optimizers.Adam(0.02))
        model(X[:2])
        return model

    return make, (X, VALUES, {})


class Annealed(layers.Layer):
    """Adds a sum over rows whose factor is 0 at first, or a sum over rows that the first batch
    lacks.
    """

    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        self.by_rows = by_rows
        self.factor = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        """Return the inputs unchanged."""
        squares = ops.sum(ops.square(x), axis=1, keepdims=True)
        factor = ops.cast(x[:, :1] > 1.5, x.dtype) if self.by_rows else self.factor
        self.add_loss(0.1 * ops.sum(factor * squares))
        return x


class Raise(keras.callbacks.Callback):
    """Sets the layer's factor in the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the factor to the number of earlier epochs."""
        self.model.layers[2].factor.assign(float(epoch))


def annealed(by_rows: bool) -> Made:
    """Return a model that begins with an Annealed layer."""

    def make() -> Any:
        entry = keras.Input((X.shape[1],))
        hidden = Annealed(by_rows)(layers.Dense(4)(entry))
        model = keras.Model(entry, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.02), "mse")
        return model

    x = X.copy()
    x[:8] = -abs(x[:8])
    return make, (x, VALUES, {} if by_rows else {"callbacks": [Raise()]})


def reader_programs() -> dict[str, Made]:
    """Return every model by its name."""
    attributes = {"rows": rows, "containers": containers, "means and sums": figures}
    weights = {"kernel": kernels, "tied decoder": tied}
    return {
        **{f"loss of attributes: {name}": reader(read) for name, read in attributes.items()},
        **{f"loss of weights: {name}": reader(read) for name, read in weights.items()},
        "loss of a second call": reader(again),
        "loss of a slope": reader(penalty),
        "add_loss: annealed sum": annealed(by_rows=False),
        "add_loss: sum over later rows": annealed(by_rows=True),
    }
