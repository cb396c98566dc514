"""A cut of batches while shares change: variables that the graph of a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tensorflow as tf

from ..errors import RequestError
from .batch_bounds import Cut


class ChangingCut(Cut):
    """A cut by whole samples; a traced step cuts by the shares that are in force when it runs."""

    def __init__(self, shares: Sequence[int], micros: Sequence[int] = ()) -> None:
        super().__init__(shares, micros=micros)
        with tf.device("CPU:0"):
            self._edges = tf.Variable(self._list_edges(), trainable=False)
            self._most = tf.Variable(tf.constant(micros or shares, tf.int64), trainable=False)

    def change(self, shares: Sequence[int], micros: Sequence[int] = ()) -> None:
        """Cut by these weights from the next step on; `micros` count only if there were some from the beginning."""
        self.weights, self.total = tuple(shares), sum(shares)
        self.micros = tuple(micros) if self.in_passes else ()
        self._edges.assign(self._list_edges())
        self._most.assign(tf.constant(micros or shares, tf.int64))

    def passes(self, device: int, rows: Any) -> Any:
        """The passes that a device takes for `rows` rows, an int64 scalar tensor."""
        with tf.device("CPU:0"):
            return -(-rows // self._most[device])

    def bounds(self, rows: Any) -> list[Any]:
        """The boundaries of a batch of `rows`: in the graph for a tensor, as they are now for an int."""
        if isinstance(rows, int):
            return super().bounds(rows)
        total = self._edges[-1]
        edges: list[Any] = tf.unstack((2 * rows * self._edges + total) // (2 * total), len(self.weights) + 1)
        return edges

    def _list_edges(self) -> Any:
        return tf.constant([0, *accumulate(self.weights)], tf.int64)


def make_changing(cut: Cut, global_batch: int | None, engine: str) -> ChangingCut:
    """The cut as one that can change while an engine trains; RequestError where it can't."""
    if engine != "multiworker":
        raise RequestError(
            f"engine={engine!r} can't rebalance: its devices wait for each other within a step.",
            "Leave rebalance out, or start a process for each device with evener launch.",
        )
    if global_batch is None:
        raise RequestError("rebalance=True needs a global batch.", "Give global_batch, or a plan.")
    return ChangingCut(cut.sizes(global_batch), cut.micros)
