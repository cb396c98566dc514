"""A linear model in a group, whose noise scale is known from the gradient of each row."""

from __future__ import annotations

from typing import Any

import keras
import msgspec
import numpy as np

from evener.keras_split import Split
from evener.keras_split.group import GroupNoise
from evener.learning.noise_scale import NoiseWindow
from tests.support.keras_twice import digest, seeded

ROWS, BATCH = 1000, 8
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(ROWS, 4))
Y = X.sum(1, keepdims=True) + 2 * RANDOM.normal(size=(ROWS, 1))


def build(split: Split, rate: float) -> Any:
    """The model in the split."""

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate, clipnorm=1e-3), "mse")
        return model

    return seeded(lambda: split.build(make))


def train(split: Split) -> dict[str, Any]:
    """The noise scale at weights that stay, and the truth; a training's weights with it and without."""
    wanting = Split(devices=split.devices, ratios=split.cut.weights, global_batch=BATCH, noise=True)
    model = build(wanting, 0.0)
    noise = wanting._noise = model.fit.hooks.engine.noise = GroupNoise(NoiseWindow(1), every=1)
    model.fit(X, Y, epochs=4, verbose=0)
    found: Any = msgspec.to_builtins(wanting.noise_scale)
    weights, bias = model.get_weights()
    error = 2 * (X @ weights + bias - Y)
    rows = np.concatenate([error * X, error], 1)
    truth = rows.var(0).sum() / np.square(rows.mean(0)).sum()
    assert model.fit.hooks.engine.describe(0.0).noise == noise.scale()
    learned = []
    for each in (wanting, split):
        model = build(each, 0.1)
        model.fit(X[:80], Y[:80], verbose=0, shuffle=False)
        learned.append(digest(model))
    return found | {"truth": float(truth), "learned": learned}
