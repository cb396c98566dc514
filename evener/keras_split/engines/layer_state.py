"""States that a model updates when it is called - seeds, metrics, moving averages - when several devices call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from evener.keras_split.compatibility import warn_inner_metric

SEED_STEP = 1 << 20  # numbers that each device draws from in passes, so that no two draw the same


class StateUpdate(NamedTuple):
    """A state's new value after one device's calls; `chained` if the next device's call starts from it.

    `added`: the value is what the calls of this device add to the state.
    """

    state: Any
    value: Any
    chained: bool
    added: bool = False


class StepStates:
    """The states of a model over the calls of one step: seeds and metrics continue from device to device.

    So no two devices draw the same numbers, and a metric inside a layer counts the rows of all devices.
    """

    def __init__(self, model: Any) -> None:
        self._metrics = {id(variable): variable for variable in model.metrics_variables}
        every = {id(variable): variable for variable in model.non_trainable_variables} | self._metrics
        self._variables = list(every.values())
        self._chained: dict[int, tuple[Any, Any]] = {}

    @property
    def chained(self) -> list[tuple[Any, Any]]:
        """Variables with the values that the next device starts from instead of theirs."""
        return list(self._chained.values())

    def pass_starts(self, device: int) -> list[tuple[Any, Any]]:
        """Every state with the value that a device's first pass starts from: devices don't wait for each other."""
        starts = []
        for state in self._variables:
            value = tf.convert_to_tensor(state)
            if id(state) in self._metrics:
                value = tf.zeros_like(value)
            elif _is_seed(state) and device:
                value += tf.cast([0, device * SEED_STEP], value.dtype)
            starts.append((state, value))
        return starts

    def pass_update(self, state: Any, value: Any) -> StateUpdate:
        """What a device's passes made of a state."""
        metric = id(state) in self._metrics
        if metric:
            warn_inner_metric(state)
        return StateUpdate(state, value, _is_seed(state), added=metric)

    def collect_updates(self, scope: Any, size: Any) -> list[StateUpdate]:
        """What a call in this StatelessScope updated; metrics don't count the filler row of a device with `size` 0."""
        found = []
        for state in self._variables:
            new, before = scope.get_current_value(state), self._chained.get(id(state), (state, None))[1]
            if new is None or new is before:
                continue
            metric = id(state) in self._metrics
            if metric:
                warn_inner_metric(state)
                new = tf.where(size > 0, new, tf.convert_to_tensor(state) if before is None else before)
            update = StateUpdate(state, new, metric or _is_seed(state))
            if update.chained:
                self._chained[id(state)] = (state, new)
            found.append(update)
        return found


def assign_updates(calls: Sequence[tuple[Any, Sequence[StateUpdate]]]) -> None:
    """Assign the states that the calls updated, each call on this part of the rows.

    Averages are averaged by rows; of chained states and counters the last call's value is kept.
    """
    found: dict[int, list[tuple[Any, StateUpdate]]] = {}
    for part, updates in calls:
        for update in updates:
            found.setdefault(id(update.state), []).append((part, update))
    for values in found.values():
        _, last = values[-1]
        if last.added:
            last.state.assign_add(tf.add_n([update.value for _, update in values]))
        elif last.chained or not tf.as_dtype(last.state.dtype).is_floating:
            last.state.assign(last.value)
        else:
            last.state.assign(tf.add_n([tf.cast(part, update.value.dtype) * update.value for part, update in values]))


def _is_seed(state: Any) -> bool:
    return bool(state.name == "seed_generator_state")
