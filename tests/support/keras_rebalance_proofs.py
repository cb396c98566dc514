"""A group of three whose shares change during training: by a script, and by the rule for a slow
process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from evener.keras import Report, Split
from evener.keras.rebalancing import ChangingCut
from evener.live import reporter as live
from evener.live.reporter import read_trainings
from evener.training.rebalance import Change
from tests.support.keras_twice import train_twice, with_variables

SHARES, MICROS = (15, 6, 3), (3, 6, 2)  # shares and rows per pass of the plan
SHARE_SECONDS = 0.024  # seconds for the rows of each share, on a clock that only rows advance
SLOW = range(60, 110)  # steps in which the second process takes twice as long
STEPS = 140

Make = Callable[[], Any]


class Scripted:
    """A rule that returns the next shares each time."""

    def __init__(self) -> None:
        self._next = itertools.cycle([(7, 14, 3), (2, 2, 20), (1, 22, 1), SHARES])

    def observe(self, _step: int, _own_work_s: Any, _rows: Any) -> Change:
        """Return the next shares, in the passes of the plan."""
        shares = next(self._next)
        return Change(shares, tuple(map(min, shares, MICROS)), "scripted", 0.0)


class SlowRows(keras.layers.Layer):
    """Advances the clock of own work for each row, in some steps twice as far in the second
    process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.now = 0.0
        self.step = 0  # the step that is trained
        self._rank = rank

    def call(self, x: Any) -> Any:
        """Return the rows unchanged."""
        with tf.control_dependencies([tf.numpy_function(self._take, [tf.shape(x)[0]], tf.int32)]):
            return tf.identity(x)

    def _take(self, rows: Any) -> Any:
        factor = 2 if self._rank == 1 and self.step in SLOW else 1
        self.now += SHARE_SECONDS * int(rows) / SHARES[self._rank] * factor
        return rows

    def timestamp(self) -> Any:
        """Return the time as TensorFlow's function does."""
        return tf.numpy_function(lambda: np.float64(self.now), [], tf.float64)


def forced(split: Split, make: Make, x: Any, y: Any, **fitted: Any) -> dict[str, Any]:
    """Return the result of six epochs, compared with one device.

    The shares change after every fifth step, with short batches and passes.
    """
    options = {
        "batch_size": 24,
        "epochs": 6,
        "shuffle": False,
        "verbose": 0,
        "validation_freq": 3,
        **fitted,
    }

    def fit(model: Any) -> Any:
        if hooks := getattr(model.fit, "hooks", None):
            change_back(split)
            hooks.engine.rebalancing._rule = Scripted()
        return model.fit(x, y, **options).history

    found = train_twice(split, lambda: with_variables(make(), x, y), fit, traced=True)
    return found | {"shares": split.shares}


def change_back(split: Split) -> None:
    """Use the plan's shares again."""
    assert isinstance(split.cut, ChangingCut)
    split.cut.change(SHARES, MICROS)


def by_rule(split: Split, make: Callable[[Any], Any], x: Any, y: Any) -> dict[str, Any]:
    """Return the changes of a training with a process that is slow for a while.

    They are the steps from which it trained with other shares, its messages about them, and the
    shares that the monitor read.
    """
    live.INTERVAL_SECONDS, live.COST_LIMIT = 0.02, 1.0  # every few steps a report is written
    change_back(split)
    slow = SlowRows(split.required_group.rank)
    watch = Watch(split, slow)
    rows = np.resize(np.arange(len(x)), 24 * STEPS)
    said = StringIO()

    def fit(model: Any) -> Any:
        calls = [Report(split), watch] if hasattr(model.fit, "hooks") else []
        with mock.patch.object(tf, "timestamp", slow.timestamp), redirect_stderr(said):
            return model.fit(
                x[rows], y[rows], batch_size=24, shuffle=False, verbose=0, callbacks=calls
            ).history

    found = train_twice(split, lambda: make(slow), fit, traced=True)
    lines = [line for line in said.getvalue().splitlines() if " since step " in line]
    return found | {"shares": watch.shares, "said": lines, "recorded": watch.recorded}


class Watch(keras.callbacks.Callback):
    """Records the shares of each step if they are new, and those that the monitor reads of this
    process.
    """

    def __init__(self, split: Split, slow: SlowRows) -> None:
        super().__init__()
        self._split, self._slow = split, slow
        self.shares: list[tuple[int, tuple[int, ...]]] = []  # with the first step
        self.recorded: list[tuple[int, ...]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the time that rows take in this step."""
        self._slow.step = batch
        if not self.shares or self.shares[-1][1] != self._split.shares:
            self.shares.append((batch, self._split.shares))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Read the report after some steps."""
        if batch % 45 == 44:
            own = [training for training in read_trainings() if training.pid == os.getpid()]
            self.recorded += [tuple(device.batch for device in each.devices) for each in own]
