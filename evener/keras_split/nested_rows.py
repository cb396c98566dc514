"""Rows of a batch: counting, cutting and joining nested tensors, for a batch of any size without a new trace.

Masks that Keras attaches to tensors are cut and joined with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ..errors import RequestError

Tensors = Any  # nested tensors, as Keras passes them to a train step


class OwnRows(NamedTuple):
    """One process' rows of a global batch; at least one row, of which `size` count."""

    data: Tensors
    size: Any  # own rows that count
    rows: Any  # rows of the global batch
    whole: Tensors  # of the global batch for the metrics, where x may be own rows


def from_frame(leaf: Any) -> Any:
    """The array of pandas' table or column, which Keras gives a second axis; anything else as it is."""
    array = leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf
    return array[:, None] if array is not leaf and array.ndim == 1 else array


def count_rows(data: Tensors) -> Any:
    """Rows of the first tensor, as an int64 scalar tensor."""
    for leaf in keras.tree.flatten(data):
        if leaf is not None:
            return tf.shape(leaf, out_type=tf.int64)[0]
    raise RequestError("A batch without any input can't be split.", "Give x.")


def cut_rows(data: Tensors, start: Any, stop: Any) -> Tensors:
    """Rows `start` to `stop` of every tensor, or row 0 where that range is empty (see `widen_if_empty`)."""
    start, stop = widen_if_empty(start, stop)
    return _map(lambda tensor: _cut(tensor, start, stop), data)


def widen_if_empty(start: Any, stop: Any) -> tuple[Any, Any]:
    """The range, or that of row 0 where it is empty, since an empty replica can abort TensorFlow.

    The caller drops what is computed from such a filler row (`take_rows` with 0 rows).
    """
    start = tf.where(stop > start, start, tf.zeros_like(start))
    return start, tf.maximum(stop, start + 1)


def take_rows(data: Tensors, rows: Any) -> Tensors:
    """The first `rows` rows of every tensor, masks kept; RequestError for a single number, which has no rows."""
    return _map(lambda tensor: _with_mask(_take(tensor, rows), [tensor], lambda masks: masks[0][:rows]), data)


def pad_rows(tensor: Any, start: Any, rows: Any) -> Any:
    """These rows from `start` on, among zeros for the other `rows` of the whole batch."""
    after = rows - start - tf.shape(tensor, tf.int64)[0]
    return tf.pad(tensor, [[start, after], *[[0, 0]] * (tensor.shape.rank - 1)])


def join_rows(parts: Sequence[Tensors]) -> Tensors:
    """Nested tensors of the same structure, concatenated, masks kept."""
    return keras.tree.map_structure(
        lambda *tensors: _with_mask(tf.concat(tensors, 0), tensors, lambda masks: tf.concat(masks, 0)), *parts
    )


def _cut(tensor: Any, start: Any, stop: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start:stop]
    first = tf.concat([[start], tf.zeros_like(tensor.dense_shape[1:])], 0)
    return tf.sparse.slice(tensor, first, tf.concat([[stop - start], tensor.dense_shape[1:]], 0))


def _take(tensor: Any, rows: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return _cut(tensor, tf.zeros_like(rows), rows)
    if tensor.shape.rank == 0:
        raise RequestError(
            "An output of the model is a single number, so it can't be put together from the devices' rows.",
            "Give it a value for each row, or use add_loss or a metric for it.",
        )
    return tensor[:rows]


def _map(function: Callable[[Any], Any], data: Tensors) -> Tensors:
    return keras.tree.map_structure(lambda tensor: None if tensor is None else function(tensor), data)


def _with_mask(result: Any, sources: Sequence[Any], combine: Callable[[list[Any]], Any]) -> Any:
    """Copy Keras' mask, the tensors' attribute `_keras_mask`, from the sources to `result`."""
    masks = [getattr(source, "_keras_mask", None) for source in sources]
    if all(mask is not None for mask in masks):
        result._keras_mask = combine(masks)
    return result
