"""A group of three whose shares change while it trains: by a script, and by the rule when the second is slow."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evener import live
from evener.keras_split import Report, Split
from evener.keras_split.changing_cut import ChangingCut
from evener.live import read_trainings
from evener.rebalance import Change
from tests.support.keras_twice import train_twice

SHARES, MICROS = (15, 6, 3), (3, 6, 2)  # of the plan
SHARE_SECONDS = 0.024  # that the rows of each share take in a group, where rows are slowed
SLOW = 15  # steps, after which the second process takes twice as long
STEPS = 60

Make = Callable[[], Any]


class Scripted:
    """A rule that gives out the next shares each time it is asked."""

    def __init__(self) -> None:
        self._next = itertools.cycle([(7, 14, 3), (2, 2, 20), (1, 22, 1), SHARES])

    def observe(self, _step: int, _own_work_s: Any, _rows: Any) -> Change:
        """The next, in the passes of the plan."""
        shares = next(self._next)
        return Change(shares, tuple(map(min, shares, MICROS)), "scripted", 0.0)


class SlowRows(keras.layers.Layer):
    """Takes a while for each row, and twice as long in the second process after some steps."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.share_seconds = SHARE_SECONDS
        self._rank = rank
        self._step = 0

    def call(self, x: Any) -> Any:
        """The rows as they are."""
        with tf.control_dependencies([tf.numpy_function(self._sleep, [tf.shape(x)[0]], tf.int32)]):
            return tf.identity(x)

    def _sleep(self, rows: Any) -> Any:
        self._step += 1
        factor = 2 if self._rank == 1 and self._step > SLOW else 1
        time.sleep(self.share_seconds * int(rows) / SHARES[self._rank] * factor)
        return rows


def forced(split: Split, make: Make, x: Any, y: Any) -> dict[str, Any]:
    """300 steps, changed after every fifth, with short batches and passes, against one device."""
    epochs = -(-300 // -(-len(x) // 24))

    def fit(model: Any) -> Any:
        if hooks := getattr(model.fit, "hooks", None):
            change_back(split)
            hooks.engine.rebalancing._rule = Scripted()
        return model.fit(x, y, batch_size=24, epochs=epochs, shuffle=False, verbose=0).history

    found = train_twice(split, make, fit)
    return found | {"shares": split.shares}


def change_back(split: Split) -> None:
    """Begin with the plan's shares again."""
    assert isinstance(split.cut, ChangingCut)
    split.cut.change(SHARES, MICROS)


def by_rule(split: Split, make: Callable[[Any], Any], x: Any, y: Any) -> dict[str, Any]:
    """With a process that is slow for a while, and one that asks the monitor what it sees."""
    live.INTERVAL_SECONDS, live.COST_LIMIT = 0.0, 1.0  # each step is written
    change_back(split)
    slow = SlowRows(split.required_group.rank)
    rows = np.resize(np.arange(len(x)), 24 * STEPS)
    seen: list[Any] = []

    def fit(model: Any) -> Any:
        hooks = getattr(model.fit, "hooks", None)
        slow.share_seconds = SHARE_SECONDS if hooks else 0.0
        calls = [Report(split), Watch(seen)] if hooks else []
        history = model.fit(x[rows], y[rows], batch_size=24, shuffle=False, verbose=0, callbacks=calls).history
        if hooks:
            seen.append(hooks.engine.rebalancing.changes)
        return history

    found = train_twice(split, lambda: make(slow), fit)
    changes, own = seen.pop(), [record.devices[0].own_work_s for record in seen if record.devices]
    return found | {
        "changes": [[change.step, change.after, change.reason] for change in changes],
        "own": max(own, default=0.0),
        "recorded": [change.after for change in seen[-1].changes],
        "ranks": sorted({(record.rank, record.world, record.training) for record in seen}),
    }


class Watch(keras.callbacks.Callback):
    """Reads what the monitor would, of this process."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After some steps."""
        if batch % 20 == 19:
            self._seen.extend(training for training in read_trainings() if training.pid == os.getpid())
