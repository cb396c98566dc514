"""How losses and variables of a batch's parts add up to those of the whole batch."""

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
    """Kinds by which a model's losses, states and attributes add up.

    - `loss`: what the compiled loss is a mean over, or a sum; "" if unknown.
    - `added`: the same for each loss that layers add.
    - `states`: for each non-trainable variable, by index.
    - `attributes`: for each tensor stored in an attribute, by name.
    - `merged`: indices of weights with a sparse gradient that has every row once.
    """

    loss: str = ROWS
    added: tuple[str, ...] = ()
    states: dict[int, str] = {}
    attributes: dict[str, str] = {}
    merged: tuple[int, ...] = ()

    def added_kind(self, place: int) -> str:
        """Return the kind of an added loss; "rows" if it wasn't measured."""
        return self.added[place] if place < len(self.added) else ROWS


def main_part(kind: str, part: Any) -> Any:
    """Return a part's weight: 1 for sums (0 without rows), else its fraction of the rows."""
    return tf.cast(part > 0, part.dtype) if kind == SUM else part


def count_units(model: Any, y: Any, outputs: Any, weight: Any) -> dict[str, Any]:
    """Return what a loss may be a mean over: steps, labels and weights, each with its count."""
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
    """Return the weights multiplied by the mask, one for each step."""
    if mask is None:
        return weight
    if weight.shape.rank == 1:
        weight = tf.reshape(weight, [-1, *[1] * (mask.shape.rank - 1)])
    return weight * tf.cast(mask, tf.float64)
