"""Padded rows that towers assign by length, compared with one device; and refused cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

from evener.errors import EvenerError
from evener.keras import Split
from tests.support.keras_twice import set_seed, train_twice, with_variables

RANDOM = np.random.default_rng(5)
STEPS, BATCH = 16, 24
# the last batch is short
LENGTHS = np.clip(np.rint(RANDOM.lognormal(1.2, 0.8, 3 * BATCH + 9)), 1, STEPS).astype(int)
INSIDE = np.arange(STEPS) < LENGTHS[:, None]
WORDS = np.where(INSIDE, RANDOM.integers(1, 11, INSIDE.shape), 0)
KINDS = RANDOM.integers(0, 5, INSIDE.shape)
WEIGHTS = np.where(INSIDE, RANDOM.uniform(0.5, 2.0, INSIDE.shape), 0.0)


def tagger(optimizer: Any, head: Any = (), **compiled: Any) -> Any:
    """Return a model with a class for each word. The mask reaches the loss."""
    return _made([layers.Embedding(11, 4, mask_zero=True), *head], optimizer, **compiled)


def convolution(optimizer: Any, padding: str = "causal", **compiled: Any) -> Any:
    """Return a model with a class for each word, without a mask: no word sees later ones."""
    return _made(
        [layers.Embedding(11, 4), layers.Conv1D(6, 3, padding=padding)], optimizer, **compiled
    )


def _made(inner: list[Any], optimizer: Any, **compiled: Any) -> Any:
    set_seed()
    model = keras.Sequential([keras.Input((None,)), *inner, layers.Dense(5, activation="softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", **compiled)
    return model


def learned(split: Split, make: Callable[[], Any], weights: Any = None) -> dict[str, Any]:
    """Return weights and metrics of two epochs, compared with one device that takes the rows in
    order.

    Rows without weights are also used for validation.
    """

    def assigned(model: Any) -> Any:
        data = split.data(WORDS, KINDS, weights, lengths=LENGTHS)
        held = {"validation_data": data} if weights is None else {}
        return model.fit(data, epochs=2, verbose=0, **held).history

    def plain(model: Any) -> Any:
        rows = (WORDS, KINDS) if weights is None else (WORDS, KINDS, weights)
        data = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
        held = {"validation_data": data} if weights is None else {}
        return model.fit(data, epochs=2, verbose=0, **held).history

    return train_twice(split, lambda: with_variables(make(), WORDS, KINDS), assigned, plain)


def computed(split: Split) -> dict[str, Any]:
    """Return the fraction of padded steps that the devices compute in an epoch.

    Also return whether each row comes once.
    """
    own, words = 0, []
    for batch in split.data(WORDS, lengths=LENGTHS, shuffle=True):
        own += int(np.sum(np.diff(batch.edges) * batch.longest))
        words += batch.data[0].numpy().tolist()
    return {"part": own / WORDS.size, "once": sorted(words) == sorted(WORDS.tolist())}


def on_one_device() -> bool:
    """Return whether one device gets the rows in order, without their lengths."""
    first, *_ = Split(devices=["CPU:0"], global_batch=BATCH).data(WORDS, lengths=LENGTHS)
    return bool((first[0].numpy() == WORDS[:BATCH]).all())


def refused(split: Split, in_passes: Split) -> dict[str, str]:
    """Return the error that ends each attempt before a step."""

    def fit(make: Callable[[], Any], weights: Any = None) -> Callable[[], Any]:
        data = split.data(WORDS, KINDS, weights, lengths=LENGTHS)
        return lambda: split.build(make).fit(data, verbose=0)

    pooled = [layers.Lambda(lambda states: states - keras.ops.mean(states, 1, keepdims=True))]
    tried: dict[str, Callable[[], Any]] = {
        "unmasked": fit(lambda: convolution("sgd")),
        "weights of rows": fit(lambda: convolution("sgd"), WEIGHTS[:, 0]),
        "looks ahead": fit(lambda: convolution("sgd", padding="same"), WEIGHTS),
        "mean over steps": fit(lambda: tagger("sgd", head=pooled)),
        "batch normalization": fit(lambda: tagger("sgd", head=[layers.BatchNormalization()])),
        "activity": fit(lambda: tagger("sgd", head=[layers.ActivityRegularization(0.1)])),
        "eager": fit(lambda: tagger("sgd", run_eagerly=True)),
        "predict": lambda: split.build(lambda: tagger("sgd")).predict(
            split.data(WORDS, lengths=LENGTHS), verbose=0
        ),
        "passes": lambda: in_passes.data(WORDS, lengths=LENGTHS),
        "fewer": lambda: split.data(WORDS, lengths=LENGTHS[1:]),
        "too long": lambda: split.data(WORDS[:, :4], lengths=LENGTHS),
        "fractions": lambda: split.data(WORDS, lengths=LENGTHS / 2),
    }
    return {name: _said(attempt) for name, attempt in tried.items()}


def _said(action: Callable[[], Any]) -> str:
    try:
        action()
    except EvenerError as error:
        return str(error)
    return ""


def main(by: dict[str, Split], in_passes: Split) -> dict[str, Any]:
    """Return every case by name."""
    clipped = lambda: optimizers.Adam(0.01, global_clipnorm=0.1)  # noqa: E731
    return {
        "masked": learned(by["5:2:1"], lambda: tagger(clipped(), metrics=["accuracy"])),
        "weighted": learned(
            by["3:1"], lambda: convolution(clipped(), weighted_metrics=["accuracy"]), WEIGHTS
        ),
        "computed": computed(by["5:2:1"]),
        "one device": on_one_device(),
        "refused": refused(by["3:1"], in_passes),
    }
