"""Samples of a group's noise scale, taken as its gradients are summed anyway; the arithmetic is learning/'s."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import tensorflow as tf

from ..learning.noise_scale import EVERY, NoiseScale, NoiseWindow, Sample

KEPT = 512  # samples until they are read, at least whenever the monitor's file is written
HOST = "CPU:0"


class GroupNoise:
    """Takes the noise scale of one model's gradient, in rows; equal in all processes.

    One of `every` steps is looked at. It changes neither gradients nor what else is summed.
    """

    def __init__(self, window: NoiseWindow | None = None, every: int = EVERY) -> None:
        self._window, self._every, self._read = window or NoiseWindow(), every, 0
        with tf.device(HOST):
            self._steps, self._count = (tf.Variable(tf.zeros([], tf.int64), trainable=False) for _ in range(2))
            self._kept = tf.Variable(tf.zeros([KEPT, 2], tf.float64), trainable=False)

    def weigh(self, gradients: Sequence[Any], size: Any, rows: Any) -> Any:
        """A scalar tensor, n_i |g_i|^2 of this process, whose `gradients` are n_i / N * g_i: `size` of `rows` rows.

        0 in a step that isn't looked at.
        """
        with tf.device(HOST):
            factor = tf.math.divide_no_nan(tf.cast(rows * rows, tf.float64), tf.cast(size, tf.float64))
        return tf.cond(self._is_sampled(), lambda: factor * _square(gradients), lambda: tf.zeros([], tf.float64))

    def note(self, weighted: Any, summed: Sequence[Any], edges: Sequence[Any]) -> None:
        """Keep a sample: the sum of what the processes `weigh`, their summed gradients, and where the batch was cut."""

        def keep() -> Any:
            whole = _square(summed)
            with tf.device(HOST):
                parts = tf.add_n([tf.cast(stop > start, tf.float64) for start, stop in pairwise(edges)])
                rows = tf.cast(edges[-1], tf.float64)
                noise = (tf.cast(weighted, tf.float64) - rows * whole) / (parts - 1)
                row = tf.stack([noise, whole - noise / rows])
                self._kept.scatter_update(tf.IndexedSlices(row, self._count.read_value() % KEPT))
                return self._count.assign_add(1)

        tf.cond(self._is_sampled(), keep, self._count.read_value)
        with tf.device(HOST):
            self._steps.assign_add(1)

    def scale(self) -> NoiseScale | None:
        """The noise scale so far; None before there are enough samples."""
        count, kept = int(self._count.numpy()), self._kept.numpy().tolist()
        for number in range(max(self._read, count - KEPT), count):
            self._window.add(Sample(*kept[number % KEPT]))
        self._read = count
        return self._window.scale()

    def _is_sampled(self) -> Any:
        with tf.device(HOST):
            return self._steps.read_value() % self._every == 0


def _square(gradients: Sequence[Any]) -> Any:
    """The squared norm, summed up in float32 at least."""
    wide = [tf.cast(each, tf.float32) if each.dtype.size < 4 else each for each in gradients]
    return tf.add_n([tf.cast(tf.reduce_sum(tf.abs(each) ** 2), tf.float64) for each in wide])
