"""Mirrored: one process, a replica of the model on each device, gradients summed by NCCL.

Keras averages over equal replicas; here each replica's loss is weighted by its rows, so that the sum is the mean over
the batch. A distributed dataset deals its elements to the replicas in turn, so each batch becomes one element for each.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ..batch_bounds import Cut
from ..compatibility import check_mask
from ..nested_rows import Tensors, count_rows, cut_rows, take_rows
from .keras_step import call_model, update_metrics

ONLY_ROWS = "evener_rows"  # names the y of data without labels, which counts the rows of x


class UnevenMirroredStrategy(tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """MirroredStrategy for replicas whose batches differ in size.

    Keras averages the first batch over the replicas only to learn its shapes, which fails when they differ: that one
    call returns the first replica's part.
    """

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Like the base class, but a mean over values of unequal shapes is the first of them."""
        if axis is None and str(reduce_op).upper().endswith("MEAN"):
            parts = [self.experimental_local_results(leaf) for leaf in tf.nest.flatten(value)]
            if any(len({tuple(part.shape) for part in leaf}) > 1 for leaf in parts):
                return tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], value)
        return super().reduce(reduce_op, value, axis)


class Mirrored:
    """Train and evaluate steps of one replica. `y` has the rows that count; `x` has one more where there are none."""

    name = "mirrored"

    def __init__(self, model: Any) -> None:
        self.model = model

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """A replica's `keras.Model.train_step`, with the loss weighted by the replica's rows."""
        model = self.model
        x, y, weight, size = _unpack(data)
        context = tf.distribute.get_replica_context()
        rows = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(size, tf.float32))
        with tf.GradientTape() as tape:
            outputs = take_rows(call_model(model, x, True), size)
            check_mask(outputs)
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
            mean = loss / _keras_scale(loss.dtype)
            scaled = model.optimizer.scale_loss(mean * (tf.cast(size, loss.dtype) / tf.cast(rows, loss.dtype)))
        if weights := model.trainable_weights:
            model.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return update_metrics(model, mean, size, x, y, outputs, weight)

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """A replica's `keras.Model.test_step`; the replica may have no row that counts."""
        model = self.model
        x, y, weight, size = _unpack(data)
        outputs = take_rows(call_model(model, x, False), size)
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=False)
        return update_metrics(model, loss / _keras_scale(loss.dtype), size, x, y, outputs, weight)


def cut_batches(dataset: Any, cut: Cut) -> Any:
    """A dataset of the pieces of whole batches: exactly len(cut.weights) elements for each batch, in order."""
    replicas = len(cut.weights)

    def cut_batch(*batch: Any) -> Any:
        data = batch[0] if len(batch) == 1 else batch
        edges = tf.stack([tf.cast(edge, tf.int64) for edge in cut.bounds(count_rows(data))])

        def part(i: Any) -> Any:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            start, stop = edges[i], edges[i + 1]
            rest = [take_rows(cut_rows(each, start, stop), stop - start) for each in (y, weight) if each is not None]
            return (cut_rows(x, start, stop), *(rest or [{ONLY_ROWS: tf.zeros([stop - start])}]))

        return tf.data.Dataset.range(replicas).map(part)

    options = tf.data.Options()
    options.deterministic = True
    return dataset.flat_map(cut_batch).with_options(options)


def distribute(strategy: Any, dataset: Any, cut: Cut) -> Any:
    """A dataset of whole batches, dealt to the replicas by `cut`."""
    return strategy.distribute_datasets_from_function(
        lambda _: cut_batches(dataset, cut).prefetch(2 * len(cut.weights))
    )


def _unpack(data: Tensors) -> tuple[Tensors, Tensors, Any, Any]:
    """x, y, weight, and how many rows of x count."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    size = count_rows(x if y is None else y)
    return x, None if isinstance(y, dict) and ONLY_ROWS in y else y, weight, size


def _keras_scale(dtype: Any) -> Any:
    """The factor 1 / replicas by which Keras scaled the mean, rounded as Keras rounds it, to divide by."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return keras.ops.cast(1.0 / replicas, dtype) if replicas > 1 else tf.ones((), dtype)
