"""Rules for combining losses, variables and attributes that parts of a batch have computed.

The kind of a value says how to combine it: as a mean weighted by rows, as a sum, and so on.
`measure_kinds.py` finds a model's kinds.

The whole batch's loss can't simply be computed at once. The activations of a gradient-accumulation
pass are freed before the next pass. Processes would have to wait for each other between their
forward and backward passes.
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
    """How values of a batch's parts are combined: as means over rows or other units, or as sums.

    - `loss`: the compiled loss; "" if unknown.
    - `added`: each loss that layers add.
    - `states`: each non-trainable variable, by index.
    - `attributes`: each tensor that a call stores in an attribute, by name.
    - `merged`: indices of the weights whose sparse gradients have every row at most once.

    Values of unknown kind combine as means over rows; audits show whether that is exact.
    """

    loss: str = ROWS
    added: tuple[str, ...] = ()
    states: dict[int, str] = {}
    attributes: dict[str, str] = {}
    merged: tuple[int, ...] = ()

    def added_kind(self, place: int) -> str:
        """Return how the loss added by a layer is combined; "rows" if that wasn't measured.

        `place` is the loss's index.
        """
        return self.added[place] if place < len(self.added) else ROWS


def main_part(kind: str, part: Any) -> Any:
    """Return the weight of a part's value in the combined value of the batch.

    `part` is the part's fraction of the rows, and is the weight of a mean. For a sum, the weight is
    1, or 0 for a part without rows.
    """
    return tf.cast(part > 0, part.dtype) if kind == SUM else part


def count_units(model: Any, y: Any, outputs: Any, weight: Any) -> dict[str, Any]:
    """Count what a loss may be averaged over instead of rows: time steps, labels and weights.

    The counts are of these rows: the steps that a mask keeps, the labels that aren't ignored, and
    the sum of the sample weights. The dict has only the units that occur here.
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
    """Return the sample weights for each time step, 0 where the mask excludes a step."""
    if mask is None:
        return weight
    if weight.shape.rank == 1:
        weight = tf.reshape(weight, [-1, *[1] * (mask.shape.rank - 1)])
    return weight * tf.cast(mask, tf.float64)
