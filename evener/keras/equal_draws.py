"""Makes random layers, such as dropout, draw the same numbers in two steps to be compared."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from .compatibility import list_normalizations
from .instances import replaced

DRAWN_BY_SHAPE = ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")
DRAWN_BY_TENSORFLOW = {
    "normal": tf.random.stateless_normal,
    "uniform": tf.random.stateless_uniform,
    "truncated_normal": tf.random.stateless_truncated_normal,
}
SEED = (3, 5)

are_alike = ContextVar("are_alike", default=False)  # True while parts draw the batch's numbers
rows_alike = ContextVar("rows_alike", default=False)  # True while all rows draw the same numbers
_kept_seeds: ContextVar[frozenset[int] | None] = ContextVar("_kept_seeds", default=None)


@contextmanager
def equal_rows(model: Any) -> Iterator[None]:
    """Context manager in which random layers draw the same numbers for each row of a batch.

    Batch normalization uses its moving averages in this context.
    """
    _replace_random_functions()
    token = rows_alike.set(True)
    try:
        with ExitStack() as still:
            for layer in list_normalizations(model, synchronized=None):
                still.enter_context(replaced(layer, "call", _normalize_by_averages(layer)))
            yield
    finally:
        rows_alike.reset(token)


def _normalize_by_averages(layer: Any) -> Callable[..., Any]:
    """Return a normalization layer's `call` that uses the moving averages, as in inference."""
    normalize = layer.call

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        del training
        return normalize(inputs, training=False, mask=mask)

    return call


@functools.cache
def _replace_random_functions() -> None:
    """Replace random functions of Keras and TensorFlow with versions that can repeat their numbers.

    This happens once per process. Outside of the context managers in this module, the functions
    work as before.
    """
    # neither library has a hook for this
    drawn: Any = import_module("keras.src.backend.tensorflow.random")
    for name in DRAWN_BY_SHAPE:
        own = getattr(drawn, name)
        setattr(drawn, name, _replace_while(own, _draw_once(own), lambda: rows_alike.get()))
    dropout = drawn.dropout
    drawn.dropout = _replace_while(dropout, _drop_equally(dropout), lambda: rows_alike.get())
    draw_seed = drawn.draw_seed
    seed_alike = _take_seed(draw_seed)
    drawn.draw_seed = _replace_while(draw_seed, seed_alike, lambda: _kept_seeds.get() is not None)
    for name, draw in DRAWN_BY_TENSORFLOW.items():
        own = getattr(tf.random, name)
        setattr(
            tf.random, name, _replace_while(own, _make_equal_draw(draw), lambda: are_alike.get())
        )


def _replace_while(
    original: Callable[..., Any], repeating: Callable[..., Any], is_active: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a function that calls `repeating` while `is_active()` is True, else `original`.

    `original` is a library's random function, and `repeating` is evener's version, which repeats
    numbers.
    """

    @functools.wraps(original)
    def draw(*given: Any, **words: Any) -> Any:
        return (repeating if is_active() else original)(*given, **words)

    return draw


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
    """Context manager in which random layers draw the same numbers in every step and row.

    Random generators are restored at the end.
    """
    seeds = frozenset(id(state) for state in model.non_trainable_variables)
    tokens = are_alike.set(True), _kept_seeds.set(seeds)
    try:
        with kept_generators(), equal_rows(model):
            yield
    finally:
        are_alike.reset(tokens[0])
        _kept_seeds.reset(tokens[1])


def _take_seed(draw_seed: Callable[..., Any]) -> Callable[..., Any]:
    def take_seed(seed: Any) -> Any:
        state = getattr(seed, "state", None)
        return draw_seed(seed) if id(state) in (_kept_seeds.get() or ()) else tf.constant(SEED)

    return take_seed


def _make_equal_draw(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for a TensorFlow random function that repeats one row.

    `draw` is the stateless version of that function, which is called with a fixed seed.
    """
    once = _draw_once(lambda shape, *given, **words: draw(shape, SEED, *given, **words))

    def draw_alike(
        shape: Any, *given: Any, seed: Any = None, name: Any = None, **words: Any
    ) -> Any:
        del seed, name
        return once(shape, *given, **words)

    return draw_alike


@contextmanager
def kept_generators() -> Iterator[None]:
    """Context manager that restores the random generators of Python, NumPy and TensorFlow."""
    # TensorFlow has such a generator only if its seed was set
    drawing = getattr(context.context(), "_rng", random.Random())
    seeds = random.getstate(), np.random.get_state(), drawing.getstate()
    try:
        yield
    finally:
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        drawing.setstate(seeds[2])
