"""A device's rows in passes: forward and backward on some of them at a time, gradients summed, one optimizer step.

The loss of a pass is the mean over its rows, weighted by them, so only means over rows are exact (`compatibility`
refuses others). The passes are a loop in the graph: the device keeps the activations of one pass only, and one trace
serves any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from evener.keras_split.compatibility import NO_PASSES, check_mask
from evener.keras_split.engines.keras_step import call_on_copies, loss_with, scale_loss
from evener.keras_split.engines.layer_state import StateUpdate, StepStates
from evener.keras_split.nested_rows import Tensors, cut_rows, take_rows

HOST = "CPU:0"  # counts and cuts: a device that counted would be waited for in each pass


class PassSums(NamedTuple):
    """The result of one device's rows."""

    outputs: Tensors  # for all of them
    loss: Any  # their part of the batch's mean
    gradients: list[Any]  # of the part of the scaled loss, for each trainable weight
    updates: list[StateUpdate]


class DevicePasses:
    """The passes of one device, the `number`-th of its process; `data` is its (x, y, weight), of which `size` count.

    `rows` are those of the whole batch.
    """

    def __init__(self, model: Any, device: str, number: int, data: Tensors, size: Any, rows: Any) -> None:
        self.model = model
        self.device = device
        self._data = data
        self._size = size
        self._rows = rows
        self._states = StepStates(model)
        self._starts = self._states.pass_starts(number)
        self._copies = [tf.identity(variable) for variable in model.trainable_variables]
        self._changed: set[int] = set()  # ids of states that a pass updates

    def run(self, passes: Any) -> PassSums:
        """Run so many passes of nearly one size, one after another; one if the device has no row that counts."""
        with tf.device(HOST):
            passes, first = tf.maximum(passes, 1), tf.zeros([], tf.int64)
            slots = tf.cast(passes, tf.int32)
        values = [value for _, value in self._starts]
        edge = tf.TensorSpec([], tf.int64)
        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        one_pass = tf.function(self._run_one, autograph=False).get_concrete_function(edge, edge, specs)
        outputs, loss, _, _ = one_pass.structured_outputs
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
                arrays = [array.write(slot, leaf) for array, leaf in zip(arrays, leaves, strict=True)]
                sums = [one + other for one, other in zip(sums, gradients, strict=True)]
                return after, total + loss, sums, values, arrays

        begin = (first, tf.zeros([], loss.dtype), list(map(tf.zeros_like, self._copies)), values, arrays)
        _, total, sums, values, arrays = tf.while_loop(is_left, body, begin, parallel_iterations=1)
        joined = keras.tree.pack_sequence_as(outputs, [array.concat() for array in arrays])
        return PassSums(joined, total, list(sums), self._updates(values))

    def _run_one(self, start: Any, stop: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        """Outputs, part of the loss, gradients and states of the pass on rows `start` to `stop`."""
        model = self.model
        with tf.device(HOST):
            count = stop - start
            x, y, weight = cut_rows(self._data, start, stop)
        with tf.device(self.device), tf.GradientTape(watch_accessed_variables=False) as tape:
            copies = [tf.identity(copy) for copy in self._copies]
            tape.watch(copies)
            states = [(state, value) for (state, _), value in zip(self._starts, values, strict=True)]
            outputs, added, regularizers, scope = call_on_copies(model, x, True, copies, states)
            outputs, y, weight = take_rows(outputs, count), take_rows(y, count), take_rows(weight, count)
            check_mask(outputs, "A plan with passes", NO_PASSES)
            loss = loss_with(model, [*added, *regularizers], x, y, outputs, weight, True)
            loss *= tf.cast(count, loss.dtype) / tf.cast(self._rows, loss.dtype)
            scaled = scale_loss(model, loss)
        with tf.device(self.device):
            zero = tf.UnconnectedGradients.ZERO
            gradients = map(tf.convert_to_tensor, tape.gradient(scaled, copies, unconnected_gradients=zero))
            return outputs, loss, list(gradients), self._note(values, scope)

    def _note(self, values: Sequence[Any], scope: Any) -> list[Any]:
        """The states after a pass that began with these values."""
        after = [scope.get_current_value(state) for state, _ in self._starts]
        pairs = zip(self._starts, values, after, strict=True)
        self._changed |= {id(state) for (state, _), value, new in pairs if new is not value}
        return after

    def _updates(self, values: Sequence[Any]) -> list[StateUpdate]:
        pairs = zip(self._starts, values, strict=True)
        return [self._states.pass_update(state, value) for (state, _), value in pairs if id(state) in self._changed]
