"""Rules for combining losses, variables and attributes that were computed for parts of a batch.

The kind of a value says how to combine it: as a mean weighted by rows, as a sum, and so on.
`measure_kinds.py` finds the kinds for a model.

These rules are needed because the loss of the whole batch can't be computed at once in two cases.
With gradient accumulation, the activations of a pass are freed before the next pass. With several
processes, all would have to wait for each other between forward and backward passes.
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

    - `loss`: kind of the compiled loss; "" if unknown.
    - `added`: kinds of the losses that layers add.
    - `states`: kinds of the non-trainable variables, by index.
    - `attributes`: kinds of the tensors that a call stores in attributes, by name.
    - `valued`: indices of the outputs whose loss has one value per row instead of a mean.
    - `merged`: indices of the weights whose sparse gradients have at most one slice per table row.

    Values of unknown kind are combined as means over rows; audits show whether that is exact.
    """

    loss: str = ROWS
    added: tuple[str, ...] = ()
    states: dict[int, str] = {}
    attributes: dict[str, str] = {}
    merged: tuple[int, ...] = ()
    valued: tuple[int, ...] = ()

    def added_kind(self, index: int) -> str:
        """Return the kind of a loss that a layer adds, or "rows" if it wasn't measured.

        The kind says how to combine the loss's values from the parts of a batch. `index` is the
        loss's index in `added`.
        """
        return self.added[index] if index < len(self.added) else ROWS


def weigh_part(kind: str, part: Any) -> Any:
    """Return the weight of a part's value when the values of a batch's parts are combined.

    For a mean, it is `part`, the part's fraction of the rows. For a sum, it is 1, or 0 for a part
    without rows.
    """
    return tf.cast(part > 0, part.dtype) if kind == SUM else part


def list_mean_losses(model: Any, kinds: PartKinds) -> list[Any]:
    """Return the metrics that track an output's loss and are averaged over the parts of a batch.

    If an output's loss has a value for each row, its metric is left out. Such a metric counts rows,
    as the model's other metrics do.
    """
    metrics = model._compile_loss.metrics if model._compile_loss else []
    return [metric for place, metric in enumerate(metrics) if place not in kinds.valued]


def count_units(model: Any, y: Any, outputs: Any, weight: Any) -> dict[str, Any]:
    """Count the units, other than rows, over which the loss of these rows may be averaged.

    The keys are "steps" for time steps that a mask keeps, "labels" for labels that aren't ignored,
    and "weights" for the sum of the sample weights. Units that don't occur are left out.
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
        found["weights"] = tf.reduce_sum(_spread_weights(tf.cast(weight, tf.float64), mask))
    return found


def _spread_weights(weight: Any, mask: Any) -> Any:
    """Return the sample weight of each time step, which is 0 where the mask excludes the step."""
    if mask is None:
        return weight
    if weight.shape.rank == 1:
        weight = tf.reshape(weight, [-1, *[1] * (mask.shape.rank - 1)])
    return weight * tf.cast(mask, tf.float64)
