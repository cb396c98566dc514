"""Trains a Keras model by a split and on one device, and tells how far they are apart."""

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
    """A factor for each feature: half precision without a matrix product, which would end the
    process where oneDNN is kept from instructions that TensorFlow sees (ONEDNN_MAX_CPU_ISA).
    """

    def build(self, shape: Any) -> None:
        """The factors."""
        self.factors = self.add_weight(shape=shape[-1:], initializer="ones", name="factors")

    def call(self, x: Any) -> Any:
        """The product."""
        return x * self.factors


def train_twice(
    split: Split,
    make: Callable[[], Model],
    run: Callable[[Model], Any],
    rival: Callable[[Model], Any] | None = None,
    instance: bool = False,
    traced: bool = False,
) -> dict[str, Any]:
    """The largest differences of weights, and of the figures that a run gives; one device may be
    run in another way.

    One device computes eagerly, which costs what a trace does, unless it is to be `traced`, as
    models with several outputs are, whose single losses Keras averages otherwise. Of a group, the
    first process alone trains on one device. What all of them must learn to the last bit is
    `learned`.
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
    """The split without audits, which take up to a third of a short training: each traces the step
    twice more. test_keras_audit.py has those of groups.
    """
    split.audited = False
    return split


def seeded(make: Callable[[], Model]) -> Model:
    """A model with the same first weights as any other that is made so."""
    set_seed()
    return make()


def set_seed() -> None:
    """Seed all that Keras draws from; TensorFlow's own seed is left: setting it drops every kernel
    that it has made.
    """
    random.seed(3)
    np.random.seed(3)


def with_variables(model: Model, x: Any, y: Any) -> Model:
    """The model, whose optimizer and metrics have their variables: fit traces it once, otherwise
    twice.
    """
    x, y = keras.tree.map_structure(lambda rows: rows[:2], (x, y))
    model.optimizer.build(model.trainable_variables)
    model.compute_metrics(x, y, model(x))
    return model


def count_traces(model: Model) -> list[int]:
    """A list that grows with each trace of the training step from here on; checks before the step
    trace nothing.
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
    """No rewriting of graphs from here on: small models take longer to rewrite than to train."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


class HasFlatten(type):
    """The class of a protocol that asks for one method, without the search for its members that
    `typing` makes each time (Python 3.11).
    """

    def __instancecheck__(cls, value: object) -> bool:
        return hasattr(type(value), "__tf_flatten__")


class QuickNestProtocol(metaclass=HasFlatten):
    """In place of TensorFlow's CustomNestProtocol."""


def trace_faster() -> None:
    """Leave out what takes a part of a trace: rewriting of graphs, filtered tracebacks, and a slow
    check of nested values. Audits read the place in the program of every operation.
    """
    leave_graphs_alone()
    keras.config.disable_traceback_filtering()
    tf.debugging.disable_traceback_filtering()
    nest_util.CustomNestProtocol = QuickNestProtocol


def digest(model: Model) -> str:
    """The weights, to the last bit."""
    return blake2b(
        b"".join(weight.tobytes() for weight in model.get_weights()), digest_size=8
    ).hexdigest()


def difference(first: Any, second: Any) -> float:
    """The largest, of figures in the same structure."""
    keras.tree.assert_same_structure(first, second)
    pairs = zip(keras.tree.flatten(first), keras.tree.flatten(second), strict=True)
    # nan, if there is one
    return float(np.max([np.abs(np.subtract(a, b, dtype=float)).max() for a, b in pairs]))
