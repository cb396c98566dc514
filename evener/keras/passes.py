"""Gradient-accumulation passes (micro-batches) of the rows that a device computes.

Each pass runs the forward and backward computation on some of the rows. Then gradients and
non-trainable variables are combined. The loss of the whole batch is exact if it is a mean or a sum
over rows. The passes are a loop in the graph, so memory holds the activations of one pass only, and
the graph is traced once for any number of passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ..training.part_values import SUM
from .attributes import PlainVariables
from .equal_draws import are_alike
from .keras_step import (
    CopiesScope,
    Tensors,
    call_in_scope,
    compute_loss_contribution,
    cut_rows,
    scale_loss,
    take_rows,
)
from .part_kinds import ROWS, SAME, PartKinds, list_mean_losses, weigh_part
from .sparse_gradients import PassGradient, drop_filler_slices

SEED_NAME = "seed_generator_state"  # Keras' name for the state of a generator
CHAINED, ADDED, AVERAGED = "chained", "added", "averaged"
HOST = "CPU:0"  # rows are counted and cut here; on the device, each pass would wait for it
SEED_STEP = 1 << 20  # seeds reserved for each device, so that no two devices draw the same numbers


class StateUpdate(NamedTuple):
    """A variable's value after a part of the batch, and the rule for combining it with other parts.

    `kind` is the rule:

    - CHAINED: the last part's value counts.
    - ADDED: the values are increments, which are added to the variable.
    - AVERAGED: the changes are averaged by rows.
    - ROWS, SUM, SAME: as measured for this model (see `part_kinds.py`).
    """

    state: Any
    value: Any
    kind: str


class StepStates:
    """Combines values of non-trainable variables and metrics from the parts of a batch.

    A part is the rows of a device, or of one of its gradient-accumulation passes.
    """

    def __init__(self, model: Any, kinds: PartKinds) -> None:
        self._kinds = find_state_kinds(model, kinds)
        self._metrics = {id(variable): variable for variable in model.metrics_variables}
        losses = list_mean_losses(model, kinds)
        self._losses = {id(each) for metric in losses for each in metric.variables}
        every = {
            id(variable): variable for variable in model.non_trainable_variables
        } | self._metrics
        self._variables = list(every.values())
        self._counted: dict[int, Any] = {}  # values of metrics after the previous devices

    def starts(self, device: int, resets_metrics: bool = True) -> list[tuple[Any, Any]]:
        """Return each variable with the value from which a device starts its part of the step.

        Random seeds differ between devices. With `resets_metrics`, metrics start from 0 on each
        device.
        """
        starts = []
        for state in self._variables:
            value = tf.convert_to_tensor(state)
            if self._is_counting(state):
                value = (
                    tf.zeros_like(value) if resets_metrics else self._counted.get(id(state), value)
                )
            elif is_seed(state) and device and not are_alike.get():
                with tf.device(HOST):
                    value += tf.cast([0, device * SEED_STEP], value.dtype)
            starts.append((state, value))
        return starts

    def update(self, state: Any, value: Any) -> StateUpdate:
        """Return a variable's value after a device's passes, with the rule for combining it."""
        if id(state) in self._losses:
            return StateUpdate(state, value, AVERAGED)
        if self._is_counting(state):
            return StateUpdate(state, value, ADDED)
        return StateUpdate(state, value, self._kinds[id(state)])

    def _is_counting(self, state: Any) -> bool:
        """Return whether the variable belongs to a metric that doesn't track a mean loss."""
        return id(state) in self._metrics and id(state) not in self._losses

    def after_pass(
        self, state: Any, before: Any, start: Any, new: Any, part: Any, first: Any
    ) -> Any:
        """Combine a variable's value after one more pass with its value from earlier passes.

        - `before`: combined value after the earlier passes.
        - `start`, `new`: value at the start and at the end of this pass.
        - `part`: the pass's fraction of the device's rows.
        - `first`: whether this is the first pass.
        """
        if self._is_counting(state):
            return tf.where(part > 0, new, before)  # no metric counts a filler row
        kind = AVERAGED if id(state) in self._losses else self._kinds[id(state)]
        if kind == CHAINED:
            return new
        if kind == SAME:
            return tf.where(first, new, before)
        return before + (new - start) * tf.cast(weigh_part(kind, part), new.dtype)

    def restarts_each_pass(self, state: Any) -> bool:
        """Return whether each pass starts from the variable's value before the step.

        Otherwise, each pass starts from the value after the previous one.
        """
        if id(state) in self._metrics:
            return id(state) in self._losses
        return self._kinds[id(state)] != CHAINED

    def collect_updates(
        self, scope: Any, starts: Sequence[tuple[Any, Any]], size: Any
    ) -> list[StateUpdate]:
        """Return the new values of variables that the model's call in `scope` has assigned.

        `starts` has the variables with their values before the call. `size` is the device's row
        count, which may be 0.
        """
        found = []
        for state, begin in starts:
            new = scope.get_current_value(state)
            if new is not begin:
                found.append(self.chain_update(state, begin, new, size))
        return found

    def chain_update(self, state: Any, begin: Any, new: Any, size: Any) -> StateUpdate:
        """Return a variable's value after a device, from which metrics go on on the next device.

        `begin` and `new` are the values before and after the device's `size` rows, which may be 0.
        """
        if id(state) not in self._metrics:
            return self.update(state, new)
        new = self._counted[id(state)] = tf.where(size > 0, new, begin)
        return StateUpdate(state, new, CHAINED)


def assign_updates(calls: Sequence[tuple[Any, Sequence[StateUpdate]]]) -> None:
    """Combine the values that devices have computed for variables, and assign the results.

    `calls` has a pair for each device: its fraction of the batch, and its updates.
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
            last.state.assign(
                start + tf.add_n([weigh_change(update, start, part) for part, update in values])
            )


def sums_changes(kind: str) -> bool:
    """Return whether variables of this kind are combined by adding up the parts' changes."""
    return kind in (ROWS, SUM)


def weigh_change(update: StateUpdate, start: Any, part: Any) -> Any:
    """Return how much a part contributes to a variable's change in the whole batch.

    The change is the sum of the contributions of all parts. `update` has the variable's value after
    the part, and `start` is its value before the step. `part` is the part's fraction of the batch.
    """
    return (update.value - start) * tf.cast(weigh_part(update.kind, part), start.dtype)


def find_state_kinds(model: Any, found: PartKinds) -> dict[int, str]:
    """Return the rule for combining each variable's values after the parts of a batch.

    The result has all non-trainable variables, by `id()`. If a variable was measured, its rule is
    in `found`. Otherwise, floats are averaged with the parts' row counts as weights, and other
    types are assumed to be the same after all parts. For a random seed, the last part's value
    counts, except within `draws_alike`, where the seed is the same after all parts.
    """
    kinds, drawn = {}, SAME if are_alike.get() else CHAINED
    for place, state in enumerate(model.non_trainable_variables):
        unknown = ROWS if tf.as_dtype(state.dtype).is_floating else SAME
        kinds[id(state)] = drawn if is_seed(state) else found.states.get(place, unknown)
    return kinds


def is_seed(state: Any) -> bool:
    """Return whether the variable is the state of one of Keras' random generators."""
    return bool(state.name == SEED_NAME)


class PassSums(NamedTuple):
    """Combined results of all passes of a device: outputs, loss, gradients and variables."""

    outputs: Tensors  # for all rows
    loss: Any  # contribution of these rows to the batch's mean
    # of the scaled loss for each trainable weight; None if the loss doesn't depend on it
    gradients: list[Any]
    updates: list[StateUpdate]


class PassLoop:
    """Computes a device's rows in passes, as a loop in a TensorFlow graph.

    - `data`, `size`: the device's rows, and their number.
    - `variables`: the model's `tf.Variable` attributes.
    - `states`: the rules for combining the variables' values.
    - `starts`: pairs of a variable and the value from which the device starts.
    """

    def __init__(
        self,
        model: Any,
        kinds: PartKinds,
        device: str,
        data: Tensors,
        size: Any,
        variables: PlainVariables,
        states: StepStates,
        starts: Sequence[tuple[Any, Any]],
    ) -> None:
        self.model = model
        self.found = kinds
        self.device = device
        self._data = data
        self._size = size
        self._variables = variables
        self._states = states
        self._starts = starts
        self._copies = [tf.identity(variable) for variable in model.trainable_variables]
        self._changed: set[int] = set()  # ids of states that a pass updates
        self._reached: list[int] = []  # indices of the trainable weights with a gradient

    def run(self, passes: Any) -> PassSums:
        """Compute the device's rows in `passes` passes, and return their combined results.

        A device without rows computes one filler row, which doesn't count.
        """
        with tf.device(HOST):
            passes, first = tf.maximum(passes, 1), tf.zeros([], tf.int64)
            slots = tf.cast(passes, tf.int32)
        values = [value for _, value in self._starts]
        edge = tf.TensorSpec([], tf.int64)
        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        one_pass = tf.function(self._run_pass, autograph=False).get_concrete_function(
            edge, edge, specs
        )
        outputs, loss, gradients, _ = one_pass.structured_outputs
        kept = [
            PassGradient(self._copies[place], gradient)
            for place, gradient in zip(self._reached, gradients, strict=True)
        ]
        arrays = [
            tf.TensorArray(leaf.dtype, slots, infer_shape=False, element_shape=leaf.shape)
            for leaf in keras.tree.flatten(outputs)
        ]

        def is_left(number: Any, *_: Any) -> Any:
            with tf.device(HOST):
                return number < passes

        def body(number: Any, total: Any, sums: Any, values: Any, arrays: Any) -> tuple[Any, ...]:
            with tf.device(HOST):
                after, slot = number + 1, tf.cast(number, tf.int32)
                start, stop = self._size * number // passes, self._size * after // passes
            outputs, loss, gradients, values = one_pass(start, stop, values)
            with tf.device(self.device):
                leaves = keras.tree.flatten(outputs)
                arrays = [
                    array.write(slot, leaf) for array, leaf in zip(arrays, leaves, strict=True)
                ]
                sums = [
                    each.add(before, gradient, slot)
                    for each, before, gradient in zip(kept, sums, gradients, strict=True)
                ]
                total = tf.nest.map_structure(tf.add, total, loss)
                return after, total, sums, values, arrays

        nothing = [each.begin(slots) for each in kept]
        zeros = tf.nest.map_structure(lambda each: tf.zeros(each.shape, each.dtype), loss)
        begin = (first, zeros, nothing, values, arrays)
        _, total, sums, values, arrays = tf.while_loop(is_left, body, begin, parallel_iterations=1)
        joined = keras.tree.pack_sequence_as(outputs, [array.concat() for array in arrays])
        whole = [each.finish(after) for each, after in zip(kept, sums, strict=True)]
        by_place = dict(zip(self._reached, whole, strict=True))
        gradients = [by_place.get(place) for place in range(len(self._copies))]
        return PassSums(joined, total, gradients, self._updates(values))

    def _run_pass(self, start: Any, stop: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        """Run one pass on rows `start` to `stop`.

        `values` are the variables' values after the previous passes. Returns tensors whose rows are
        joined, tensors that are summed over the passes, the gradients, and the variables' new
        values. This function is traced once.
        """
        raise NotImplementedError

    def _begin(self, values: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return pairs of a variable and the value from which the next pass starts.

        `values` are the variables' values after the previous pass.
        """
        pairs = zip(self._starts, values, strict=True)
        return [
            (state, begin if self._states.restarts_each_pass(state) else value)
            for (state, begin), value in pairs
        ]

    def _states_after_pass(
        self, start: Any, count: Any, values: Sequence[Any], states: Sequence[Any], scope: Any
    ) -> list[Any]:
        """Return the variables' values after one more pass, combined with those of earlier passes.

        The pass has `count` rows from row `start` on. `values` are the values after the earlier
        passes. `states` are pairs of a variable and the value from which this pass started. `scope`
        has the values that this pass assigned.
        """
        part, after = count / tf.maximum(self._size, 1), []
        for value, (state, begin) in zip(values, states, strict=True):
            new = scope.get_current_value(state)
            if new is not begin:
                self._changed.add(id(state))
                value = self._states.after_pass(state, value, begin, new, part, start == 0)
            after.append(value)
        return after

    def _updates(self, values: Sequence[Any]) -> list[StateUpdate]:
        pairs = zip(self._starts, values, strict=True)
        return [
            self._states.update(state, value)
            for (state, _), value in pairs
            if id(state) in self._changed
        ]


class DevicePasses(PassLoop):
    """Computes a device's rows in gradient-accumulation passes.

    - `number`: the device's index.
    - `data`, `size`: the device's rows, and their number.
    - `rows`: row count of the whole batch.
    - `variables`: the model's `tf.Variable` attributes.
    """

    def __init__(
        self,
        model: Any,
        kinds: PartKinds,
        device: str,
        number: int,
        data: Tensors,
        size: Any,
        rows: Any,
        variables: PlainVariables,
    ) -> None:
        states = StepStates(model, kinds)
        starts = states.starts(number)
        super().__init__(model, kinds, device, data, size, variables, states, starts)
        self._rows = rows

    def _run_pass(self, start: Any, stop: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        """Run one pass on rows `start` to `stop`, forward and backward.

        `values` are the variables' values after the previous passes. Returns the outputs, the
        contribution to the loss, the gradients and the variables' new values. This function is
        traced once.
        """
        model = self.model
        with tf.device(HOST):
            count = stop - start
            x, y, weight = cut_rows(self._data, start, stop)
        with tf.device(self.device), tf.GradientTape(watch_accessed_variables=False) as tape:
            copies = [tf.identity(copy) for copy in self._copies]
            tape.watch(copies)
            states = self._begin(values)
            self._variables.restore()
            part = tf.cast(count, tf.float64) / tf.cast(self._rows, tf.float64)
            parts = (part, weigh_part(self.found.loss, part))
            # the loss too, because it may read weights or call the model again
            with CopiesScope(model, copies, states) as scope:
                outputs, added, regularizers = call_in_scope(model, x, True)
                batch = x, y, outputs, weight
                loss = compute_loss_contribution(
                    model, self.found, [*added, *regularizers], batch, True, parts
                )
            scope.check_weights()
            scope.assign_others()
            scaled = scale_loss(model, loss.trained)
        with tf.device(self.device):
            gradients = tape.gradient(scaled, copies)
            self._reached = [
                place for place, gradient in enumerate(gradients) if gradient is not None
            ]
            reached = [drop_filler_slices(gradients[place], count) for place in self._reached]
            return (
                take_rows(outputs, count),
                loss.logged,
                reached,
                self._states_after_pass(start, count, values, states, scope),
            )
