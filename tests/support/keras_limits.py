"""Fits in which one part of a step is slow, and what their reports say about it."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf

from evener.keras import Report, Split
from evener.live.measured import measure_rank
from evener.live.reporter import newest_reporter
from evener.training.step_limits import judge_training
from tests.support.keras_proofs import make_plan

ROWS, STEPS, SLOW_SECONDS = 8, 60, 0.02
X = np.random.default_rng(0).normal(size=(ROWS * STEPS, 4)).astype("float32")


class SlowBetween(keras.callbacks.Callback):
    """Waits after each step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Wait."""
        time.sleep(SLOW_SECONDS)


class SlowValidation(keras.callbacks.Callback):
    """Waits in each batch of a validation."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Wait."""
        time.sleep(SLOW_SECONDS)


class Judged(keras.callbacks.Callback):
    """Stores what limits the steps, as the app judges a report, before the report ends."""

    def on_train_end(self, logs: Any = None) -> None:
        """Judge the last report."""
        reporter = newest_reporter()
        record = None if reporter is None else reporter.read()
        if record is None:
            self.found: dict[str, Any] = {"limits": [], "devices": []}
            return
        ranks = [
            measure_rank(record, live, live.id, record.whole, live.micro, 0.0)
            for live in record.devices
        ]
        self.found = {
            "limits": [str(each.kind) for each in judge_training(ranks).limits],
            "whole": msgspec.to_builtins(record.whole),
            "devices": [[live.own_work_s, live.waiting_s] for live in record.devices],
        }


def slow_rows(rows: Any) -> Any:
    """Return the rows after a while."""
    time.sleep(SLOW_SECONDS)
    return rows


def train_each(_rank: int, *parts: str) -> dict[str, Any]:
    """Return the report on a training with each slow part, one after another, by the part."""
    return {part: train(part) for part in parts}


def train(part: str) -> dict[str, Any]:
    """Return the report on a training with a slow part."""
    os.environ["EVENER_LIVE_DIR"] = os.path.join(tempfile.mkdtemp(), "live")
    os.environ.pop("EVENER_RUN", None)
    split = Split(make_plan(5, 3))

    def build() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def take(x: Any) -> Any:
        if part != "input":
            return x, x[:, :1]
        slow = tf.ensure_shape(tf.numpy_function(slow_rows, [x], tf.float32), [None, 4])
        return slow, slow[:, :1]

    data = tf.data.Dataset.from_tensor_slices(X).batch(ROWS).map(take)
    judged = Judged()
    words: dict[str, Any] = {"callbacks": [judged, Report(split)]}
    if part == "between":
        words["callbacks"].append(SlowBetween())
    if part == "validation":
        words["callbacks"].append(SlowValidation())
        words |= {"validation_data": data, "epochs": 4, "steps_per_epoch": STEPS // 4}
    split.build(build).fit(data, verbose=0, **words)
    return judged.found
