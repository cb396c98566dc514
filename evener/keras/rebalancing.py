"""Moves rows between the processes that train a Keras model, if that makes training faster.

Work times are measured in the step's graph, and sent with the all-reduce of the gradients. All
processes thus see the same times after the same step, and make the same change.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import tensorflow as tf

from ..plan.file import Share
from ..plan.solver import proportional_curves, read_curves
from ..shares.divisions import Cut
from ..training.rebalance import Rebalancer, name_devices


class ChangingCut(Cut):
    """Division of each batch among devices that can change without tracing the step again.

    The shares are variables, so a traced step uses their current values.
    """

    def __init__(self, shares: Sequence[int], micros: Sequence[int] = ()) -> None:
        super().__init__(shares, micros=micros)
        with tf.device("CPU:0"):
            self._edges = tf.Variable(self._list_edges(), trainable=False)
            self._most = tf.Variable(tf.constant(micros or shares, tf.int64), trainable=False)

    def change(self, shares: Sequence[int], micros: Sequence[int] = ()) -> None:
        """Use other shares from the next step on.

        `shares` are rows per device, and `micros` the maximum rows of each device's
        gradient-accumulation passes. `micros` are ignored if the division began without passes.
        """
        # the traced step of such a cut has no passes
        self.weights = tuple(shares)
        self.total = sum(shares)
        self.micros = tuple(micros) if self.in_passes else ()
        self._edges.assign(self._list_edges())
        self._most.assign(tf.constant(micros or shares, tf.int64))

    def passes(self, device: int, rows: Any) -> Any:
        """Return how many passes a device needs for `rows` rows, as a tensor."""
        with tf.device("CPU:0"):
            return -(-rows // self._most[device])

    def bounds(self, rows: Any) -> list[Any]:
        """Return the index of each device's first row in the batch; the last entry is `rows`."""
        if isinstance(rows, int):
            return super().bounds(rows)
        total = self._edges[-1]
        edges: list[Any] = tf.unstack(
            (2 * rows * self._edges + total) // (2 * total), len(self.weights) + 1
        )
        return edges

    def _list_edges(self) -> Any:
        return tf.constant([0, *accumulate(self.weights)], tf.int64)


KEPT_STEPS = 25
HOST = "CPU:0"


class GroupStep(NamedTuple):
    """Times of one training step in all processes, in seconds."""

    number: int
    rows: int  # rows of the whole batch
    own_work_s: tuple[float, ...]  # time of each process until its last gradient
    met_s: float  # time from its last gradient until this process had all sums


class WorkTimes:
    """Stores how long each process computed in the latest 25 steps, in variables of the graph."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        with tf.device(HOST):
            self._count = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            self._kept = tf.Variable(tf.zeros([KEPT_STEPS, 2 + size], tf.float64), trainable=False)

    def read_time(self, tensors: Sequence[Any]) -> Any:
        """Return the Unix time at which all of `tensors` are computed, as a tensor."""
        with tf.control_dependencies(tensors):
            # on the tensor's device, which computes in order
            last = tf.reshape(tensors[-1], [-1])[:1]
        with tf.device(HOST), tf.control_dependencies([tf.identity(last)]):
            return tf.timestamp()

    def place_at_rank(self, own_work_s: Any, kind: Any) -> Any:
        """Return a vector with this process's work time at the index of its rank, and 0 elsewhere.

        Summed over all processes, these vectors give all work times. `kind` is the vector's dtype.
        """
        return tf.one_hot(self._rank, self._size, tf.cast(own_work_s, kind), dtype=kind)

    def store(self, rows: Any, own_works: Any, met_s: Any) -> None:
        """Store a step's row count, the work times of all processes, and this one's waiting time.

        `met_s` is the waiting time: from this process's last gradient until it has all sums. All
        times are in seconds.
        """
        with tf.device(HOST):
            own = tf.stack([tf.cast(rows, tf.float64), met_s])
            row = tf.concat([own, tf.cast(own_works, tf.float64)], 0)
            place = self._count.read_value() % KEPT_STEPS
            self._kept.scatter_update(tf.IndexedSlices(row, place))
            self._count.assign_add(1)

    def read(self) -> list[GroupStep]:
        """Return the stored steps, the oldest first."""
        count = int(self._count.numpy())
        kept = self._kept.numpy().tolist()
        steps = []
        for number in range(max(0, count - KEPT_STEPS), count):
            rows, met_s, *own = kept[number % KEPT_STEPS]
            steps.append(GroupStep(number, int(rows), tuple(own), met_s))
        return steps


WINDOW_STEPS = 5  # number of steps in a window; their median is one measurement
FEWEST_STEPS = 3  # minimum number of steps with full batches in a window


class GroupRebalancer:
    """Decides from measured work times when the processes should get different shares of the rows.

    `shares` are the plan's shares, or empty without a plan.
    """

    def __init__(self, cut: ChangingCut, shares: Sequence[Share], rank: int) -> None:
        curves = read_curves(shares) if shares else proportional_curves(cut.weights)
        most = [share.most for share in shares] or [0] * len(cut.weights)
        self._rule = Rebalancer(cut.weights, curves, most, cut.in_passes, name_devices(shares))
        self._cut = cut
        self._rank = rank
        self._steps = 0  # number of steps since the last window
        self._next = 0  # the first step of the next window

    def after_steps(self, steps: int, times: WorkTimes) -> None:
        """Change the shares if the latest steps show that other shares would be faster.

        `steps` is the number of steps since the last call. All processes see the same times, so
        they make the same change. Every process has to call this after the same steps.
        """
        self._steps += steps
        if self._steps < WINDOW_STEPS:
            return
        self._steps = 0
        seen = times.read()
        window = [
            step for step in seen if step.number >= self._next and step.rows == self._cut.total
        ]
        self._next = seen[-1].number + 1
        if len(window) < FEWEST_STEPS:
            return
        before = self._cut.weights
        own = [median(each) for each in zip(*(step.own_work_s for step in window), strict=True)]
        change = self._rule.observe(seen[-1].number, own, before)
        if change is None:
            return
        self._cut.change(change.shares, change.micros)
        if self._rank == 0:
            print(f"{change.describe(before)}\n", end="", file=sys.stderr, flush=True)
