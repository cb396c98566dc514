"""Calls of a model on a few rows that leave nothing behind, in a graph for any number of rows.

A graph is used because an engine's step is a graph, too: Keras computes some operations
differently if the number of rows is known. For example, `ops.add(x, y)` of shapes (3, 3) and (3,
1) takes y for a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .attributes import CallTensors, Leaves
from .equal_draws import equal_rows
from .keras_step import Tensors, call_model, open_rows, split_losses
from .loss_kinds import traceless
from .passes import is_seed


class CallResult(NamedTuple):
    """The outputs, losses and states of a call on some rows."""

    outputs: Tensors
    losses: list[Any]  # of layers
    added: list[float]  # losses without regularizers, as numbers
    states: dict[int, Any]  # new values by index in model.non_trainable_variables
    attributes: Leaves  # tensors that were left in attributes


class ModelCall:
    """A function that calls a model on rows like x; a model that runs eagerly is called eagerly."""

    def __init__(self, model: Any, x: Tensors, training: bool) -> None:
        self.model = model
        self._training = training
        self._varied = [
            *model.trainable_variables,
            *(each for each in model.non_trainable_variables if not is_seed(each)),
            *([model.optimizer._iterations] if model.optimizer else []),
        ]
        self._places: list[int] = []  # indices of the states that a call assigns
        self._left: Any = None  # the attributes as a call leaves them
        self._run: Any = self._call
        if not model.run_eagerly:
            traced = tf.function(self._call, autograph=False)
            values = [tf.TensorSpec(each.shape, each.dtype) for each in self._varied]
            with traceless(model):
                self._run = traced.get_concrete_function(
                    tf.nest.map_structure(open_rows, x), values
                )

    def __call__(
        self,
        x: Tensors,
        states: Mapping[int, Any] | None = None,
        varied: Sequence[tuple[Any, Any]] = (),
    ) -> CallResult:
        """Call the model on these rows.

        During the call, states and variables have the values in `states`, by index in
        `model.non_trainable_variables`, and in `varied`, which are (variable, value).
        """
        every = self.model.non_trainable_variables
        given = {id(every[place]): value for place, value in (states or {}).items()}
        given |= {id(variable): value for variable, value in varied}
        values = [
            tf.convert_to_tensor(given.get(id(each), each), each.dtype) for each in self._varied
        ]
        with traceless(self.model):
            outputs, masks, losses, after, attributes = self._run(x, values)
        for leaf, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
            if mask is not None:
                leaf._keras_mask = mask
        found = {place: np.asarray(value) for place, value in zip(self._places, after, strict=True)}
        added = [float(tf.reduce_sum(loss)) for loss in split_losses(self.model, losses)[0]]
        return CallResult(outputs, losses, added, found, attributes)

    def leave(self, result: CallResult) -> None:
        """Set the model's attributes to the tensors that the call with this result left there."""
        self._left.restore()
        self._left.put(result.attributes)

    def _call(self, x: Tensors, values: Sequence[Any]) -> tuple[Any, ...]:
        model = self.model
        before = CallTensors(model)
        pairs = list(zip(self._varied, values, strict=True))
        with keras.StatelessScope(state_mapping=pairs, collect_losses=True) as scope:
            with equal_rows(model):
                outputs = call_model(model, x, self._training)
            losses = list(model.losses)
        begins = {id(variable): value for variable, value in pairs}
        states = {
            place: scope.get_current_value(state)
            for place, state in enumerate(model.non_trainable_variables)
            if id(state) in begins
        }
        every = model.non_trainable_variables
        changed = [p for p, value in states.items() if value is not begins[id(every[p])]]
        self._places[:] = changed
        attributes = before.collect()
        self._left = CallTensors(model)
        before.restore()
        masks = [getattr(leaf, "_keras_mask", None) for leaf in keras.tree.flatten(outputs)]
        after = [tf.convert_to_tensor(states[place]) for place in changed]
        return outputs, masks, losses, after, attributes
