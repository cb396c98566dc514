"""A linear model in a group, whose noise scale is known from the gradient of each row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import msgspec
import numpy as np

from evener.keras_split import Split
from evener.keras_split.group import GroupNoise
from evener.training.noise_scale import NoiseWindow, separate
from tests.support.keras_twice import digest, seeded, with_variables

ROWS, BATCH = 515, 8
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(ROWS, 4))
Y = X.sum(1, keepdims=True) + 2 * RANDOM.normal(size=(ROWS, 1))


def build(split: Split, rate: float) -> Any:
    """The model in the split."""

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate, clipnorm=1e-3), "mse")
        return with_variables(model, X, Y)

    return seeded(lambda: split.build(make))


def train(split: Split) -> dict[str, Any]:
    """The largest difference of a step's sample from that of the rows' own gradients, at weights
    that stay and under shares that change; a training's weights with noise and without.
    """
    options: Any = {
        "devices": split.devices,
        "ratios": split.cut.weights,
        "global_batch": BATCH,
        "rebalance": True,
    }
    wanting = Split(**options, noise=True)
    model = build(wanting, 0.0)
    noise = wanting._noise = model.fit.hooks.engine.noise = GroupNoise(NoiseWindow(1), every=1)
    edges, changing = list[list[int]](), wanting._changing
    assert changing is not None

    def cut(number: int) -> None:
        changing.change(((6, 2), (1, 7), (8, 0), (3, 5))[number % 4])
        edges.append(
            [int(each) for each in wanting.cut.bounds(min(BATCH, len(X) - BATCH * number))]
        )

    begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda number, **_: cut(number))
    model.fit(X, Y, shuffle=False, callbacks=[begin], verbose=0)
    weights, bias = model.get_weights()
    error = 2 * (X @ weights + bias - Y)
    rows = np.concatenate([error * X, error], 1)
    kept, off = noise._kept.numpy()[: int(noise._count.numpy())], list[float]()
    for number, bounds in enumerate(edges):
        pieces = [rows[BATCH * number :][start:stop] for start, stop in pairwise(bounds)]
        sizes = [len(piece) for piece in pieces]
        if all(sizes):
            weighted = sum(len(piece) * float(np.square(piece.mean(0)).sum()) for piece in pieces)
            expected = separate(
                sizes, weighted, float(np.square(np.concatenate(pieces).mean(0)).sum())
            )
            off += abs(kept[number] / expected - 1).tolist()
    assert model.fit.hooks.engine.describe(0.0)[0].noise == noise.scale()
    scale = msgspec.to_builtins(noise.scale())
    changing.change(split.cut.weights)
    models, learned = (model, build(split, 0.1)), []
    for each in models:
        each.optimizer.learning_rate = 0.1
        each.fit(X[:80], Y[:80], verbose=0, shuffle=False)
        learned.append(digest(each))
    return {"scale": scale, "steps": len(off) // 2, "off": max(off), "learned": learned}
