"""How losses, states and attributes of a batch's parts combine into those of the whole batch.

A kind is the way in which they combine: a mean weighted by rows, a sum, and so on.
`measure_kinds.py` determines the kinds of a model. With passes, the loss of the whole batch can't
be computed at once, because the activations of a pass are freed before the next pass runs.
Processes could exchange outputs, inputs and attributes and compute the loss of all rows, but each
step would wait for that between its forward and backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import msgspec
import tensorflow as tf

ROWS, SUM, SAME = "rows", "sum", "same"
COUNTS = ("steps", "labels", "weights")  # units other than rows that a loss may be a mean over
OTHER = ""  # none of these kinds


class PartKinds(msgspec.Struct, frozen=True):
    """How losses, states and attributes of a batch's parts combine into those of the whole batch.

    By default, every loss is a mean over rows. `loss` and `added` (the losses that layers add) are
    ROWS, SUM, one of COUNTS, or OTHER. `states` has the kind (ROWS, SUM, SAME or OTHER) of each
    state's change, by its index in `model.non_trainable_variables`. `attributes` has the kind of
    each tensor that a call stores in an attribute, unless the tensor consists of rows. Values of
    kind OTHER are combined like ROWS; audits check whether that is exact.
    """

    loss: str = ROWS
    added: tuple[str, ...] = ()
    states: dict[int, str] = {}
    attributes: dict[str, str] = {}

    def added_kind(self, place: int) -> str:
        """Return the kind of the layers' loss at index `place`; ROWS if it wasn't measured."""
        return self.added[place] if place < len(self.added) else ROWS


def main_part(kind: str, part: Any) -> Any:
    """Return the weight of a part's value in the value of the whole batch.

    `part` is the part's fraction of the rows, as a tensor. The weight is `part`, but 1 if `kind` is
    SUM. A filler row has the fraction 0, and always the weight 0.
    """
    return tf.cast(part > 0, part.dtype) if kind == SUM else part


def count_units(model: Any, y: Any, outputs: Any, weight: Any) -> dict[str, Any]:
    """Return how many of each unit, such as unmasked steps, these tensors have, by the unit's name.

    A unit is what a loss may be a mean over. Only units in COUNTS that occur in the tensors are
    counted. The counts are float64 tensors.
    """
    found = {}
    masks = [getattr(each, "_keras_mask", None) for each in keras.tree.flatten(outputs)]
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
    """Return the weights of all steps, with 0 for steps that the mask excludes.

    Without a mask, the weights are returned unchanged.
    """
    if mask is None:
        return weight
    if weight.shape.rank == 1:
        weight = tf.reshape(weight, [-1, *[1] * (mask.shape.rank - 1)])
    return weight * tf.cast(mask, tf.float64)


def find_fitting(
    whole: float, parts: Sequence[float], counts: Mapping[str, Sequence[float]], rounding: float
) -> list[str]:
    """Return the kinds that explain the value of the whole from the values of its parts.

    `counts` maps the name of a unit to its count in each part, such as {"rows": (3, 5), "labels":
    (20, 61)}. A unit's name is returned if the mean of the parts' values, weighted by these counts,
    equals `whole` within the relative `rounding`. SUM is returned if the sum of the parts' values
    equals it.
    """
    values = [abs(value) for value in (whole, *parts) if math.isfinite(value)]
    near = rounding * max(values, default=0.0)
    sums = {name: mean_by(parts, each) for name, each in counts.items()}
    sums[SUM] = sum(parts)
    return [name for name, value in sums.items() if abs(value - whole) <= near]


def mean_by(values: Sequence[float], counts: Sequence[float]) -> float:
    """Return the mean of values, weighted by counts.

    A value with count 0 is ignored, because it is NaN if it is a mean over nothing. If all counts
    are 0, the result is infinite.
    """
    total = sum(counts)
    if not total:
        return math.inf
    pairs = zip(values, counts, strict=True)
    return sum(count * value for value, count in pairs if count) / total
