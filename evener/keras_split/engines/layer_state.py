"""States that a model moves as it is called - seeds, metrics, moving averages - when several devices call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from evener.keras_split.compatibility import warn_counted


class Move(NamedTuple):
    """A state's new value after one device's call; `handed` if the next device's call goes on from it."""

    state: Any
    value: Any
    handed: bool


class States:
    """The states of a model over the calls of one step: seeds and metrics go on from device to device.

    So no two devices draw the same numbers, and a metric that a layer keeps counts the rows of all.
    """

    def __init__(self, model: Any) -> None:
        self._metrics = {id(variable): variable for variable in model.metrics_variables}
        known = {id(variable): variable for variable in model.non_trainable_variables} | self._metrics
        self._variables = list(known.values())
        self._handed: dict[int, tuple[Any, Any]] = {}

    @property
    def handed(self) -> list[tuple[Any, Any]]:
        """Variables with the values that the next device begins with instead of theirs."""
        return list(self._handed.values())

    def moves(self, scope: Any, size: Any) -> list[Move]:
        """What a call in this StatelessScope moved; metrics don't count the filler row of a device with `size` 0."""
        found = []
        for state in self._variables:
            new, before = scope.get_current_value(state), self._handed.get(id(state), (state, None))[1]
            if new is None or new is before:
                continue
            metric = id(state) in self._metrics
            if metric:
                warn_counted(state)
                new = tf.where(size > 0, new, tf.convert_to_tensor(state) if before is None else before)
            move = Move(state, new, metric or _is_seed(state))
            if move.handed:
                self._handed[id(state)] = (state, new)
            found.append(move)
        return found


def settle(calls: Sequence[tuple[Any, Sequence[Move]]]) -> None:
    """Give the model the states that its calls moved, each on this part of the rows.

    Averages are averaged by rows; of what is handed on, and of counters, the last call's value is kept.
    """
    found: dict[int, list[tuple[Any, Move]]] = {}
    for part, moves in calls:
        for move in moves:
            found.setdefault(id(move.state), []).append((part, move))
    for values in found.values():
        _, last = values[-1]
        if last.handed or not _is_float(last.state):
            last.state.assign(last.value)
        else:
            last.state.assign(tf.add_n([tf.cast(part, move.value.dtype) * move.value for part, move in values]))


def _is_seed(state: Any) -> bool:
    return bool(state.name == "seed_generator_state")


def _is_float(state: Any) -> bool:
    return bool(tf.as_dtype(state.dtype).is_floating)
