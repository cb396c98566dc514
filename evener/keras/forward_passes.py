"""Evaluates the rows of a device in passes, as a loop in a TensorFlow graph.

A share that trains in gradient-accumulation passes doesn't fit in memory at once. So an evaluation
runs the model in passes of as many rows, and joins their outputs. Loss and metrics are then
computed from the outputs of the whole batch, as without passes. Memory holds the activations of one
pass, and the outputs of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .attributes import CallTensors, Leaves, PlainVariables
from .keras_step import (
    CopiesScope,
    Tensors,
    call_in_scope,
    cut_rows,
    find_logits,
    take_rows,
    weigh_added,
)
from .part_kinds import ROWS, PartKinds, weigh_part
from .passes import HOST, PassLoop, StateUpdate, StepStates


class Evaluated(NamedTuple):
    """What a model's call returns for the rows of a device, which were computed in passes.

    A device without rows has those of one filler row.
    """

    outputs: Tensors  # with Keras' masks and logits
    losses: list[Any]  # those that layers add, without regularizers'
    updates: list[StateUpdate]
    attributes: Leaves  # tensors that the call stored in attributes


class ForwardPasses:
    """Evaluates a batch's rows in forward passes, device by device.

    `left` finds the tensors that the model's call stores in attributes. Create the object before
    the model is called.
    """

    def __init__(self, model: Any, kinds: PartKinds, left: CallTensors) -> None:
        self._model = model
        self._kinds = kinds
        self._left = left
        self._states = StepStates(model, kinds)
        self._variables = PlainVariables(model)

    def run(self, device: str, number: int, x: Tensors, size: Any, passes: Any) -> Evaluated:
        """Compute the outputs of a device's rows in `passes` passes.

        `number` is the device's index. `x` has the inputs of its rows, and `size` is their number.
        """
        self._left.restore()
        with tf.device(device):
            starts = self._states.starts(number, resets_metrics=False)
            loop = _ForwardLoop(
                self._model, self._kinds, device, x, size, self._variables, self._states, starts
            )
            return loop.evaluate(passes, self._left)


class _ForwardLoop(PassLoop):
    """The forward passes of one device."""

    _left: CallTensors
    _masked: Sequence[int] = ()  # indices of the outputs with a mask
    _with_logits: Sequence[int] = ()  # indices of the outputs with logits

    def evaluate(self, passes: Any, left: CallTensors) -> Evaluated:
        """Compute the device's rows in `passes` passes, and return the results of all rows."""
        self._left = left
        found = self.run(passes)
        outputs, masks, logits, rows = found.outputs
        leaves = keras.tree.flatten(outputs)
        for place, mask in zip(self._masked, masks, strict=True):
            leaves[place]._keras_mask = mask
        for place, logit in zip(self._with_logits, logits, strict=True):
            leaves[place]._keras_logits = logit
        losses, others = found.loss
        return Evaluated(outputs, losses, found.updates, {**rows, **others})

    def _run_pass(self, start: Any, stop: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        """Run one pass on rows `start` to `stop`, and return its results for `run`.

        `values` are the variables' values after the previous passes. This function is traced once.
        """
        with tf.device(HOST):
            count = stop - start
            x = cut_rows(self._data, start, stop)
            # a filler row counts as a whole part here; the caller gives its results no weight
            part = tf.cast(tf.maximum(count, 1), tf.float64) / tf.cast(
                tf.maximum(self._size, 1), tf.float64
            )
        with tf.device(self.device):
            states = self._begin(values)
            self._variables.restore()
            with CopiesScope(self.model, self._copies, states) as scope:
                outputs, added, _ = call_in_scope(self.model, x, False)
            scope.check_weights()
            scope.assign_others()
            outputs = take_rows(outputs, tf.maximum(count, 1))  # a single number is refused
            losses = [
                weigh_added(self.found.added_kind(place), loss, part, loss.dtype)
                for place, loss in enumerate(added)
            ]
            rows, others = self._collect_attributes(part, start)
            return (
                (outputs, *self._collect_marks(outputs), rows),
                (losses, others),
                [],
                self._states_after_pass(start, count, values, states, scope),
            )

    def _collect_marks(self, outputs: Tensors) -> tuple[list[Any], list[Any]]:
        """Return the masks and the logits that Keras has attached to the outputs."""
        leaves = keras.tree.flatten(outputs)
        masks = {place: getattr(leaf, "_keras_mask", None) for place, leaf in enumerate(leaves)}
        logits = {place: find_logits(leaf) for place, leaf in enumerate(leaves)}
        self._masked = [place for place, mask in masks.items() if mask is not None]
        self._with_logits = [place for place, logit in logits.items() if logit is not None]
        return [masks[place] for place in self._masked], [
            logits[place] for place in self._with_logits
        ]

    def _collect_attributes(self, part: Any, start: Any) -> tuple[Leaves, Leaves]:
        """Return the tensors that the model's call has stored in attributes, by name.

        The first dict has those with rows. The second has the others' contributions to the value
        for all rows: `part` is this pass's fraction of them, and `start` its first row.
        """
        kinds, rows, others = self.found.attributes, {}, {}
        for name, leaf in self._left.collect().items():
            if name not in kinds and leaf.shape.rank != 0:
                rows[name] = leaf
            elif leaf.dtype.is_floating:
                others[name] = leaf * tf.cast(weigh_part(kinds.get(name, ROWS), part), leaf.dtype)
            elif leaf.dtype.is_integer:
                others[name] = tf.where(start == 0, leaf, tf.zeros_like(leaf))
        return rows, others

    def _updates(self, values: Sequence[Any]) -> list[StateUpdate]:
        """Return the variables that passes have changed, with their `values` after all of them."""
        return [
            self._states.chain_update(state, begin, value, self._size)
            for (state, begin), value in zip(self._starts, values, strict=True)
            if id(state) in self._changed
        ]
