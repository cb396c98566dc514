"""States that a model updates when it is called - seeds, metrics, moving averages - when several devices call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..compatibility import warn_inner_metric
from ..part_kinds import ROWS, SAME, SUM, PartKinds
from .keras_step import main_part

CHAINED, ADDED = "chained", "added"
SEED_STEP = 1 << 20  # numbers that each device draws from in passes, so that no two draw the same


class StateUpdate(NamedTuple):
    """A state's new value after one device's calls, and how it is put together with the other devices'.

    CHAINED: the next device's call starts from it; ADDED: it is what the calls add to the state; else as measured.
    """

    state: Any
    value: Any
    kind: str


class StepStates:
    """The states of a model over the calls of one step: seeds and metrics continue from device to device.

    So no two devices draw the same numbers, and a metric inside a layer counts the rows of all devices.
    """

    def __init__(self, model: Any, found: PartKinds) -> None:
        self._kinds = kinds_of_states(model, found)
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
            elif is_seed(state) and device:
                value += tf.cast([0, device * SEED_STEP], value.dtype)
            starts.append((state, value))
        return starts

    def pass_update(self, state: Any, value: Any) -> StateUpdate:
        """The update of a state by a device's passes."""
        if id(state) not in self._metrics:
            return StateUpdate(state, value, self._kinds[id(state)])
        warn_inner_metric(state)
        return StateUpdate(state, value, ADDED)

    def after_pass(self, state: Any, before: Any, start: Any, new: Any, part: Any, first: Any) -> Any:
        """A state's value after another pass, on a `part` of the device's rows; all passes but chained ones `start`."""
        if id(state) in self._metrics:
            return tf.where(part > 0, new, before)  # a filler row counts in none
        kind = self._kinds[id(state)]
        if kind == CHAINED:
            return new
        if kind == SAME:
            return tf.where(first, new, before)
        return before + (new - start) * tf.cast(main_part(kind, part), new.dtype)

    def starts_anew(self, state: Any) -> bool:
        """True if every pass starts from a state's value at the start of the step."""
        return id(state) not in self._metrics and self._kinds[id(state)] != CHAINED

    def collect_updates(self, scope: Any, size: Any) -> list[StateUpdate]:
        """The states that a call in this StatelessScope updated; metrics don't count the filler row of an idle one."""
        found = []
        for state in self._variables:
            new, before = scope.get_current_value(state), self._chained.get(id(state), (state, None))[1]
            if new is None or new is before:
                continue
            metric = id(state) in self._metrics
            if metric:
                warn_inner_metric(state)
                new = tf.where(size > 0, new, tf.convert_to_tensor(state) if before is None else before)
            update = StateUpdate(state, new, CHAINED if metric else self._kinds[id(state)])
            if update.kind == CHAINED:
                self._chained[id(state)] = (state, new)
            found.append(update)
        return found


def assign_updates(calls: Sequence[tuple[Any, Sequence[StateUpdate]]]) -> None:
    """Assign the states that the calls updated, each call on this part of the rows.

    Averages are averaged by rows, sums summed; of chained states the last call's value is kept, of others the first's.
    """
    found: dict[int, list[tuple[Any, StateUpdate]]] = {}
    for part, updates in calls:
        for update in updates:
            found.setdefault(id(update.state), []).append((part, update))
    for values in found.values():
        _, last = values[-1]
        if last.kind == ADDED:
            last.state.assign_add(tf.add_n([update.value for _, update in values]))
        elif last.kind in (CHAINED, SAME):
            last.state.assign((last if last.kind == CHAINED else values[0][1]).value)
        else:
            start = tf.convert_to_tensor(last.state)
            last.state.assign(start + tf.add_n([change(update, start, part) for part, update in values]))


def adds_up(kind: str) -> bool:
    """True if a state's new value comes from the changes of all devices."""
    return kind in (ROWS, SUM)


def change(update: StateUpdate, start: Any, part: Any) -> Any:
    """One device's change, on this part of the rows, of a state that adds up by rows or as a sum."""
    return (update.value - start) * tf.cast(main_part(update.kind, part), start.dtype)


def kinds_of_states(model: Any, found: PartKinds) -> dict[int, str]:
    """The way to put together the values that several devices give to a state, by the state's id."""
    kinds = {}
    for place, state in enumerate(model.non_trainable_variables):
        unknown = ROWS if tf.as_dtype(state.dtype).is_floating else SAME
        kinds[id(state)] = CHAINED if is_seed(state) else found.states.get(place, unknown)
    return kinds


def is_seed(state: Any) -> bool:
    """True if random numbers are drawn from a state."""
    return bool(state.name == "seed_generator_state")
