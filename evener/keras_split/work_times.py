"""Own work of each process of a group in a step: timed inside the step's graph, read now and then.

Every process' own work goes through the sum of the gradients, so that all of them know all figures, and the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import tensorflow as tf

from ..live.times import DeviceTimes, middle, spread, sum_up

KEPT_STEPS = 25
HOST = "CPU:0"


class GroupStep(NamedTuple):
    """A step of the group."""

    number: int
    rows: int  # of the whole batch
    began: float  # when it had its rows; seconds since the epoch
    waiting_s: float  # of this process, from its last gradient until the sum over all
    own_work_s: tuple[float, ...]  # of each process, until its last gradient


class StepSummary(NamedTuple):
    """Typical times of this process' steps; 0 where nothing was trained yet."""

    work: DeviceTimes
    step_s: float
    step_spread: float  # interquartile range over the median


class WorkTimes:
    """The last steps of a group of `size` processes, as the process of this rank sees them."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        with tf.device(HOST):
            self._count = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            self._kept = tf.Variable(tf.zeros([KEPT_STEPS, 3 + size], tf.float64), trainable=False)

    def now(self, tensors: Sequence[Any]) -> Any:
        """Seconds since the epoch when these tensors were computed, in the graph."""
        with tf.control_dependencies(tensors):
            last = tf.reshape(tensors[-1], [-1])[:1]  # on its device, which computes in order
        with tf.device(HOST), tf.control_dependencies([tf.identity(last)]):
            return tf.timestamp()

    def spread(self, own_work_s: Any, kind: Any) -> Any:
        """A vector that holds this process' figure, and 0 for the others: its sum has all of them."""
        return tf.one_hot(self._rank, self._size, tf.cast(own_work_s, kind), dtype=kind)

    def note(self, rows: Any, began: Any, ready: Any, own_works: Any) -> None:
        """Keep a step: `ready` is when its last own gradient was, `own_works` the summed vector."""
        waiting = self.now([own_works]) - ready
        with tf.device(HOST):
            figures = [tf.cast(each, tf.float64) for each in (rows, began, waiting)]
            row = tf.concat([tf.stack(figures), tf.cast(own_works, tf.float64)], 0)
            place = self._count.read_value() % KEPT_STEPS
            self._kept.scatter_update(tf.IndexedSlices(row, place))
            self._count.assign_add(1)

    def summarize(self) -> StepSummary:
        """Summarize the steps that are kept."""
        steps = self.read()
        if not steps:
            return StepSummary(DeviceTimes(), 0.0, 0.0)
        lengths = [after.began - before.began for before, after in pairwise(steps)]
        own, waiting = [step.own_work_s[self._rank] for step in steps], [step.waiting_s for step in steps]
        return StepSummary(sum_up(own, waiting), middle(lengths), spread(lengths))

    def read(self) -> list[GroupStep]:
        """The last steps, oldest first."""
        count, kept = int(self._count.numpy()), self._kept.numpy().tolist()
        steps = []
        for number in range(max(0, count - KEPT_STEPS), count):
            rows, began, waiting, *own = kept[number % KEPT_STEPS]
            steps.append(GroupStep(number, int(rows), began, waiting, tuple(own)))
        return steps
