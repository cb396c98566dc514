"""Calls of a model that leave no trace: random numbers, states and weights are afterwards what they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

DRAWN_BY_SHAPE = ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")


@contextmanager
def traceless(model: Any, states: Sequence[tuple[Any, Any]] = ()) -> Iterator[Any]:
    """A scope that collects what calls of the model assign and add to its loss; `states` have other values."""
    layers = [model, *model._flatten_layers(include_self=False)]
    own = {id(each): each for layer in layers for each in vars(layer).values() if isinstance(each, tf.Variable)}
    values = [(variable, variable.numpy()) for variable in own.values()]
    drawing = getattr(context.context(), "_rng", random.Random())  # TensorFlow's, where it has a seed
    seeds = random.getstate(), np.random.get_state(), drawing.getstate()
    try:
        # where Keras regularizes in a scope, it knows only the weights that were given to it
        given = [(each, tf.convert_to_tensor(each)) for each in model.trainable_weights if each.regularizer is not None]
        with keras.StatelessScope(state_mapping=[*given, *states], collect_losses=True) as scope:
            yield scope
    finally:
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        drawing.setstate(seeds[2])
        for variable, value in values:
            variable.assign(value)
        model._clear_losses()


@contextmanager
def equal_rows() -> Iterator[None]:
    """Keras draws the same numbers for each row, and BatchNormalization takes its moving averages."""
    drawn = import_module("keras.src.backend.tensorflow.random")
    normalize = keras.layers.BatchNormalization.call

    def normalize_still(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        del training
        return normalize(layer, inputs, training=False, mask=mask)

    with ExitStack() as patches:
        for name in DRAWN_BY_SHAPE:
            patches.enter_context(patch.object(drawn, name, _draw_once(getattr(drawn, name))))
        patches.enter_context(patch.object(drawn, "dropout", _drop_equally(drawn.dropout)))
        patches.enter_context(patch.object(keras.layers.BatchNormalization, "call", normalize_still))
        yield


def _draw_once(draw: Callable[..., Any]) -> Callable[..., Any]:
    def draw_one_row(shape: Any, *given: Any, **words: Any) -> Any:
        sizes = [int(size) for size in shape]
        return tf.broadcast_to(draw([1, *sizes[1:]], *given, **words), sizes) if sizes else draw(shape, *given, **words)

    return draw_one_row


def _drop_equally(drop: Callable[..., Any]) -> Callable[..., Any]:
    def drop_in_all_rows(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        shape = list(noise_shape or inputs.shape)
        return drop(inputs, rate, noise_shape=[1, *shape[1:]] if shape else noise_shape, seed=seed)

    return drop_in_all_rows
