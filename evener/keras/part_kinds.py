"""Combine the losses, states and attributes of a batch's parts.

The kind of a value says how: as a mean weighted by rows, as a sum, and so on. `measure_kinds.py`
determines a model's kinds.

The whole batch's loss can't simply be computed at once. The activations of a pass are freed before
the next pass. Processes would have to wait for each other between their forward and backward
passes.
"""

from __future__ import annotations

from typing import Any

import keras
import msgspec
import tensorflow as tf

from ..training.part_values import SUM

ROWS, SAME = "rows", "same"
COUNTS = ("steps", "labels", "weights")  # units other than rows that a loss may be a mean over
OTHER = ""  # none of these kinds


class PartKinds(msgspec.Struct, frozen=True):
    """The kinds of a model's values: how the values of parts combine.

    - `loss`: kind of the model's own loss: ROWS, SUM, one of COUNTS, or OTHER.
    - `added`: kinds of the losses that layers add.
    - `states`: kind of each state's change, by index in `model.non_trainable_variables`.
    - `attributes`: kind of each tensor that a call stores in an attribute, by name.
    - `merged`: indices of the trainable weights whose sparse gradient on one device has at most one
      slice for each row of the weight.

    Values of the kind OTHER are combined like ROWS; audits check whether that is exact.
    """

    loss: str = ROWS
    added: tuple[str, ...] = ()
    states: dict[int, str] = {}
    attributes: dict[str, str] = {}
    merged: tuple[int, ...] = ()

    def added_kind(self, place: int) -> str:
        """Return the kind of the layers' loss at index `place`; ROWS if it wasn't measured."""
        return self.added[place] if place < len(self.added) else ROWS


def main_part(kind: str, part: Any) -> Any:
    """Return the weight of a part's value in the whole batch's value.

    The weight is `part`, the part's fraction of the rows as a tensor. For a SUM, it is 1, or 0 for
    a filler row (`part` is 0).
    """
    return tf.cast(part > 0, part.dtype) if kind == SUM else part


def count_units(model: Any, y: Any, outputs: Any, weight: Any) -> dict[str, Any]:
    """Return the numbers of units in these tensors, by the units' names.

    A unit is something that a loss may average over, such as unmasked steps. Only units in COUNTS
    that occur in the tensors are counted. The numbers are float64 tensors.
    """
    found = {}
    masks = [getattr(leaf, "_keras_mask", None) for leaf in keras.tree.flatten(outputs)]
    mask = next((each for each in masks if each is not None), None)
    if mask is not None:
        found["steps"] = tf.reduce_sum(tf.cast(mask, tf.float64))
    ignored = getattr(model.loss, "ignore_class", None)
    if ignored is not None and tf.is_tensor(y):
        found["labels"] = tf.reduce_sum(tf.cast(y != tf.cast(ignored, y.dtype), tf.float64))
    if tf.is_tensor(weight):
        found["weights"] = tf.reduce_sum(_spread(tf.cast(weight, tf.float64), mask))
    return found


def _spread(weight: Any, mask: Any) -> Any:
    """Return each time step's weight; 0 if the mask excludes the step."""
    if mask is None:
        return weight
    if weight.shape.rank == 1:
        weight = tf.reshape(weight, [-1, *[1] * (mask.shape.rank - 1)])
    return weight * tf.cast(mask, tf.float64)
