"""Fits whose callbacks log evener's metrics, with a split and without."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import keras
import numpy as np

from evener.keras import Report, Split, make_logical_cpus

ROWS, STEPS, STEP_SECONDS = 8, 30, 0.05
X = np.random.default_rng(0).normal(size=(ROWS * STEPS, 4)).astype("float32")


class Slow(keras.callbacks.Callback):
    """Waits in each step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(STEP_SECONDS)


class Kept(keras.callbacks.Callback):
    """Stores the arguments of a tracker's callback."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append({name: float(figure) for name, figure in logs.items()})


def build() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def train(_rank: int, planned: bool) -> dict[str, Any]:
    """Train one epoch with metrics, and one with a Report that doesn't log them."""
    os.environ["EVENER_LIVE_DIR"] = os.path.join(tempfile.mkdtemp(), "live")
    kept, plain = Kept(), Kept()
    if planned:
        make_logical_cpus(2)
        split = Split(devices=["CPU:0", "CPU:1"], ratios=[5, 3], global_batch=ROWS)
        model, reports = split.build(build), (Report(split, log=True), Report(split))
    else:
        model, reports = build(), (Report(rows=ROWS, log=True), Report(rows=ROWS))
    for report, callback in zip(reports, (kept, plain), strict=True):
        calls = [report, Slow(), callback]
        model.fit(X, X[:, :1], batch_size=ROWS, epochs=1, verbose=0, callbacks=calls)
    return {"logs": kept.logs, "plain": plain.logs}
