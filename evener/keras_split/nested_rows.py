"""Rows of a batch: counting, cutting and joining nested tensors, for a batch of any size without a new trace.

Masks that Keras puts on tensors travel with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from evener.errors import RequestError

Tensors = Any  # nested tensors, as Keras hands them to a train step


class OwnRows(NamedTuple):
    """What one process of a group computes of a global batch; at least one row, of which `size` count."""

    data: Tensors
    size: Any  # own rows that count
    rows: Any  # rows of the global batch


def count(data: Tensors) -> Any:
    """Rows of the first tensor, as an int64 scalar tensor."""
    for leaf in keras.tree.flatten(data):
        if leaf is not None:
            return tf.shape(leaf, out_type=tf.int64)[0]
    raise RequestError("A batch without any input can't be split.", "Give x.")


def piece(data: Tensors, start: Any, stop: Any) -> Tensors:
    """Rows `start` to `stop` of every tensor, or row 0 where there are none (`filled`)."""
    start, stop = filled(start, stop)
    return _each(lambda tensor: _cut(tensor, start, stop), data)


def filled(start: Any, stop: Any) -> tuple[Any, Any]:
    """The range, or that of row 0 where it is empty, since an empty replica can abort TensorFlow.

    Whoever takes a filler row drops what comes of it (`head` with 0 rows).
    """
    start = tf.where(stop > start, start, tf.zeros_like(start))
    return start, tf.maximum(stop, start + 1)


def head(data: Tensors, rows: Any) -> Tensors:
    """The first `rows` rows of every tensor, masks kept; RequestError for a single number, which has no rows."""
    return _each(lambda tensor: _masked(_head(tensor, rows), [tensor], lambda masks: masks[0][:rows]), data)


def join(parts: Sequence[Tensors]) -> Tensors:
    """Nested tensors of the same structure, one after another, masks kept."""
    return keras.tree.map_structure(
        lambda *tensors: _masked(tf.concat(tensors, 0), tensors, lambda masks: tf.concat(masks, 0)), *parts
    )


def _cut(tensor: Any, start: Any, stop: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start:stop]
    first = tf.concat([[start], tf.zeros_like(tensor.dense_shape[1:])], 0)
    return tf.sparse.slice(tensor, first, tf.concat([[stop - start], tensor.dense_shape[1:]], 0))


def _head(tensor: Any, rows: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return _cut(tensor, tf.zeros_like(rows), rows)
    if tensor.shape.rank == 0:
        raise RequestError(
            "An output of the model is a single number, so it can't be put together from the devices' rows.",
            "Give it a value for each row, or use add_loss or a metric for it.",
        )
    return tensor[:rows]


def _each(function: Callable[[Any], Any], data: Tensors) -> Tensors:
    return keras.tree.map_structure(lambda tensor: None if tensor is None else function(tensor), data)


def _masked(result: Any, sources: Sequence[Any], combine: Callable[[list[Any]], Any]) -> Any:
    """Carry Keras' mask, which stands on a tensor as `_keras_mask`, over to `result`."""
    masks = [getattr(source, "_keras_mask", None) for source in sources]
    if all(mask is not None for mask in masks):
        result._keras_mask = combine(masks)
    return result
