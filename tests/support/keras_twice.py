"""Trains a Keras model by a split and on one device, and returns their differences."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest_util

from evener.keras import Split

Model = Any


class Scaled(keras.layers.Layer):
    """A factor for each feature.

    It gives half precision without a matrix product, which would kill the process if oneDNN is kept
    from instructions that TensorFlow sees (ONEDNN_MAX_CPU_ISA).
    """

    def build(self, shape: Any) -> None:
        """Create the factors."""
        self.factors = self.add_weight(shape=shape[-1:], initializer="ones", name="factors")

    def call(self, x: Any) -> Any:
        """Return the product."""
        return x * self.factors


def train_twice(
    split: Split,
    make: Callable[[], Model],
    run: Callable[[Model], Any],
    rival: Callable[[Model], Any] | None = None,
    instance: bool = False,
    traced: bool = False,
) -> dict[str, Any]:
    """Return the largest differences of weights, and of the values that a run returns.

    One device may be run in another way. It computes eagerly, which costs as much as a trace,
    unless it is to be `traced`, as are models with several outputs, whose single losses Keras
    otherwise averages. Only the first process of a group trains on one device. `learned` is what
    all of them must learn to the last bit.
    """
    many = seeded(lambda: split.build(make() if instance else make))
    second = run(many)
    found = {"learned": [digest(many), second]}
    if split.engine == "multiworker" and split.required_group.rank:
        return found
    one = seeded(make)
    one.run_eagerly = not traced
    first = (rival or run)(one)
    return found | {
        "weights": difference(one.get_weights(), many.get_weights()),
        "logs": difference(first, second),
    }


def unaudited(split: Split) -> Split:
    """Return the split without audits, which take up to a third of a short training.

    Each audit traces the step two more times. test_keras_audit.py has those of groups.
    """
    split.audited = False
    return split


def seeded(make: Callable[[], Model]) -> Model:
    """Return a model with the same first weights as any other made this way."""
    set_seed()
    return make()


def set_seed() -> None:
    """Seed all random generators of Keras.

    TensorFlow's own seed isn't set, because that drops every kernel that it has made.
    """
    random.seed(3)
    np.random.seed(3)


def with_variables(model: Model, x: Any, y: Any) -> Model:
    """Return the model after creating the variables of its optimizer and metrics.

    fit then traces it once instead of twice.
    """
    x, y = keras.tree.map_structure(lambda rows: rows[:2], (x, y))
    model.optimizer.build(model.trainable_variables)
    model.compute_metrics(x, y, model(x))
    return model


def count_traces(model: Model) -> list[int]:
    """Return a list that grows with each later trace of the training step.

    Checks before the step trace nothing.
    """
    traces: list[int] = []
    loss = model.compute_loss

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if not tf.executing_eagerly():
            traces.append(1)
        return loss(*arguments, **keywords)

    model.compute_loss = counted
    return traces


def leave_graphs_alone() -> None:
    """Turn off the rewriting of graphs: small models take longer to rewrite than to train."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


class HasFlatten(type):
    """The class of a protocol with one method.

    It avoids the search for its members that `typing` makes each time (Python 3.11).
    """

    def __instancecheck__(cls, value: object) -> bool:
        return hasattr(type(value), "__tf_flatten__")


class QuickNestProtocol(metaclass=HasFlatten):
    """A replacement for TensorFlow's CustomNestProtocol."""


def trace_faster() -> None:
    """Turn off slow parts of a trace.

    They are the rewriting of graphs, filtered tracebacks, and a slow check of nested values. Audits
    read the place in the program of every operation.
    """
    leave_graphs_alone()
    keras.config.disable_traceback_filtering()
    tf.debugging.disable_traceback_filtering()
    nest_util.CustomNestProtocol = QuickNestProtocol


def digest(model: Model) -> str:
    """Return a digest of the weights, to the last bit."""
    return blake2b(
        b"".join(weight.tobytes() for weight in model.get_weights()), digest_size=8
    ).hexdigest()


def difference(first: Any, second: Any) -> float:
    """Return the largest difference of values in the same structure."""
    keras.tree.assert_same_structure(first, second)
    pairs = zip(keras.tree.flatten(first), keras.tree.flatten(second), strict=True)
    # nan if there is one
    return float(np.max([np.abs(np.subtract(a, b, dtype=float)).max() for a, b in pairs]))
