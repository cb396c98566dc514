"""A cut that changes between steps without another trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from evener.keras_split.batch_bounds import Cut


class VariableCut(Cut):
    """A cut whose weights and passes lie in variables, so that other shares need no other trace."""

    def __init__(self, devices: int, in_passes: bool = False) -> None:
        super().__init__([1] * devices)
        self._in_passes = in_passes
        with tf.device("CPU:0"):
            self._held = tf.Variable(self.weights, dtype=tf.int64, trainable=False)
            self._micro = tf.Variable(self.weights, dtype=tf.int64, trainable=False)

    @property
    def in_passes(self) -> bool:
        """Whether the steps are traced for passes."""
        return self._in_passes

    def passes(self, device: int, rows: Any) -> Any:
        """As any cut, by the present rows of a pass."""
        with tf.device("CPU:0"):
            return -(-rows // self._micro.read_value()[device])

    def move(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Cut by these shares, and these rows of a pass, from now on."""
        self._held.assign(list(shares))
        self._micro.assign(list(micro or shares))

    def bounds(self, rows: Any) -> list[Any]:
        """As any cut, by the present weights."""
        now = Cut(self.weights)
        now.weights = tuple(tf.unstack(self._held.read_value()))
        now.total = tf.reduce_sum(self._held)
        return now.bounds(rows)
