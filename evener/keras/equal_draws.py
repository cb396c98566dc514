"""Random numbers that are the same for a row wherever it is computed, while parts of a batch are
compared with the whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

DRAWN_BY_SHAPE = ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")
DRAWN_BY_TENSORFLOW = {
    "normal": tf.random.stateless_normal,
    "uniform": tf.random.stateless_uniform,
    "truncated_normal": tf.random.stateless_truncated_normal,
}
SEED = (3, 5)

are_alike = ContextVar("are_alike", default=False)  # True while parts draw what the whole does


@contextmanager
def equal_rows() -> Iterator[None]:
    """Keras draws the same numbers for each row, and BatchNormalization takes its moving
    averages.
    """
    drawn = import_module("keras.src.backend.tensorflow.random")
    normalize = keras.layers.BatchNormalization.call

    def normalize_still(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        del training
        return normalize(layer, inputs, training=False, mask=mask)

    with ExitStack() as patches:
        for name in DRAWN_BY_SHAPE:
            patches.enter_context(patch.object(drawn, name, _draw_once(getattr(drawn, name))))
        patches.enter_context(patch.object(drawn, "dropout", _drop_equally(drawn.dropout)))
        patches.enter_context(
            patch.object(keras.layers.BatchNormalization, "call", normalize_still)
        )
        yield


def _draw_once(draw: Callable[..., Any]) -> Callable[..., Any]:
    def draw_one_row(shape: Any, *given: Any, **words: Any) -> Any:
        if isinstance(shape, tf.Tensor):
            if shape.shape.rank != 1 or shape.shape[0] is None:
                return draw(shape, *given, **words)
            shape = tf.unstack(shape)
        sizes = list(shape)
        if not sizes:
            return draw(shape, *given, **words)
        row = draw([1, *sizes[1:]], *given, **words)
        return tf.repeat(row, sizes[0], axis=0)

    return draw_one_row


def _drop_equally(drop: Callable[..., Any]) -> Callable[..., Any]:
    def drop_in_all_rows(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        shape = list(noise_shape or inputs.shape)
        return drop(inputs, rate, noise_shape=[1, *shape[1:]] if shape else noise_shape, seed=seed)

    return drop_in_all_rows


@contextmanager
def draws_alike(model: Any) -> Iterator[None]:
    """`equal_rows` for a graph of a step: each device and each pass draws what the whole batch
    does.

    TensorFlow's own numbers, and Keras' that have no generator of the model, come from one seed.
    """
    drawn = import_module("keras.src.backend.tensorflow.random")
    own = {id(state) for state in model.non_trainable_variables}
    draw_seed = drawn.draw_seed

    def take_seed(seed: Any) -> Any:
        state = getattr(seed, "state", None)
        return draw_seed(seed) if id(state) in own else tf.constant(SEED)

    token = are_alike.set(True)
    try:
        with kept_generators(), equal_rows(), ExitStack() as patches:
            patches.enter_context(patch.object(drawn, "draw_seed", take_seed))
            for name, draw in DRAWN_BY_TENSORFLOW.items():
                patches.enter_context(patch.object(tf.random, name, _without_state(draw)))
            yield
    finally:
        are_alike.reset(token)


def _without_state(draw: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow's function of this kind, by one seed and the same for each row."""
    once = _draw_once(lambda shape, *given, **words: draw(shape, SEED, *given, **words))

    def draw_alike(
        shape: Any, *given: Any, seed: Any = None, name: Any = None, **words: Any
    ) -> Any:
        del seed, name
        return once(shape, *given, **words)

    return draw_alike


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put back what Python, NumPy and TensorFlow draw next, where it has a seed."""
    drawing = getattr(context.context(), "_rng", random.Random())
    seeds = random.getstate(), np.random.get_state(), drawing.getstate()
    try:
        yield
    finally:
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        drawing.setstate(seeds[2])
