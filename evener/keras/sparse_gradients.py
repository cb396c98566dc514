"""Adds up sparse gradients, such as those of an embedding table, over passes and processes.

A sparse gradient consists of slices, one for each use of a table row. Keras' optimizers square and
clip each slice separately. On one device, nothing sums the slices before the optimizer. If they
were summed here, the model would learn something else, so passes and processes only concatenate
them.

There is one exception. `tf.nn.embedding_lookup_sparse`, which Keras also uses to multiply a sparse
input, reads each table row once, so on one device the gradient has one slice per row. The slices of
such a gradient are merged after they were concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .keras_step import pad_rows

# operations that keep the values of the indices
SAME_VALUES = ("Identity", "Reshape", "Cast", "StopGradient")
WITHOUT_REPEATS = (  # operations whose indices occur once
    "Unique",
    "UniqueV2",
    "SparseSegmentSumGradV2",
    "SparseSegmentMeanGradV2",
    "SparseSegmentSqrtNGradV2",
)


def has_each_row_once(gradient: Any) -> bool:
    """Return whether a gradient is sparse and has at most one slice for each table row."""
    return (
        isinstance(gradient, tf.IndexedSlices)
        and _find_source(gradient.indices).type in WITHOUT_REPEATS
    )


def joins_look_ups(gradient: Any) -> bool:
    """Return whether several lookups contribute to a sparse gradient, at least one without repeats.

    A lookup without repeats reads each table row only once.
    """
    return isinstance(gradient, tf.IndexedSlices) and _joins_look_ups(gradient.indices)


def _joins_look_ups(indices: Any) -> bool:
    made = _find_source(indices)
    if made.type != "ConcatV2":
        return False
    *joined, _ = made.inputs  # the last input is the axis
    return any(
        _find_source(each).type in WITHOUT_REPEATS or _joins_look_ups(each) for each in joined
    )


def _find_source(indices: Any) -> Any:
    """Return the graph operation that computes the indices of a sparse gradient."""
    made = indices.op
    while made.type in SAME_VALUES:
        made = made.inputs[0].op
    return made


def merge_slices(gradients: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    """Merge slices of the same table row.

    `indices` are the positions of the gradients to merge; the others are returned unchanged.
    """
    return [
        _merge(gradient)
        if place in indices and isinstance(gradient, tf.IndexedSlices)
        else gradient
        for place, gradient in enumerate(gradients)
    ]


def _merge(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def drop_filler_slices(gradient: Any, rows: Any) -> Any:
    """Remove all slices of a sparse gradient if the device computes only a filler row.

    `rows` is the device's row count without the filler row.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    count = tf.where(rows > 0, tf.shape(gradient.indices, tf.int64)[0], 0)
    return tf.IndexedSlices(gradient.values[:count], gradient.indices[:count], gradient.dense_shape)


def make_spec(tensor: Any) -> Any:
    """Return the spec of a tensor, or of a sparse gradient with any number of slices."""
    if not isinstance(tensor, tf.IndexedSlices):
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    shape = tf.TensorShape([None, *tensor.values.shape[1:]])
    return tf.IndexedSlicesSpec(
        shape, tensor.dtype, tensor.indices.dtype, tensor.dense_shape.dtype, tf.TensorShape([None])
    )


def fill_gradients(model: Any, group: Any, gradients: Sequence[Any]) -> list[Any]:
    """Fill in zeros for gradients that are None in this process, but not in another one.

    Otherwise, the processes would sum tensors of different lengths, and wait for each other
    forever. A gradient that is dense in any process becomes dense in all. Every process has to call
    this.
    """
    # Python code may choose weights by a process's own rows.
    sparse = [float(isinstance(each, tf.IndexedSlices)) for each in gradients]
    dense = [
        float(each is not None) - is_sparse
        for each, is_sparse in zip(gradients, sparse, strict=True)
    ]
    any_dense, any_sparse = group.sum([tf.constant(dense), tf.constant(sparse)])
    filled = []
    for place, weight in enumerate(model.trainable_weights):
        gradient = gradients[place]
        if any_dense[place] > 0:
            gradient = tf.zeros_like(weight) if gradient is None else tf.convert_to_tensor(gradient)
        elif any_sparse[place] > 0 and gradient is None:
            shape = tf.shape(weight, tf.int64)
            none = tf.zeros([0, *weight.shape[1:]], weight.dtype)
            gradient = tf.IndexedSlices(none, tf.zeros([0], tf.int64), shape)
        filled.append(gradient)
    return filled


class PassGradient:
    """Adds up one weight's gradient over passes; slices of a sparse gradient are concatenated."""

    def __init__(self, weight: Any, pass_gradient: Any) -> None:
        self._weight = weight
        self._one = pass_gradient

    def begin(self, passes: Any) -> Any:
        """Return an empty gradient, to which the gradients of `passes` passes can be added."""
        if not isinstance(self._one, tf.IndexedSlices):
            return tf.zeros_like(self._weight)
        return [
            tf.TensorArray(
                leaf.dtype, passes, infer_shape=False, element_shape=[None, *leaf.shape[1:]]
            )
            for leaf in (self._one.values, self._one.indices)
        ]

    def add(self, before: Any, gradient: Any, pass_index: Any) -> Any:
        """Add the gradient of pass `pass_index` to `before`, and return the result."""
        if not isinstance(gradient, tf.IndexedSlices):
            summed = before + gradient
            summed.set_shape(before.shape)  # unknown if an axis of length 1 meets an open one
            return summed
        leaves = gradient.values, gradient.indices
        return [array.write(pass_index, leaf) for array, leaf in zip(before, leaves, strict=True)]

    def finish(self, after: Any) -> Any:
        """Return the gradient of all passes, given the result of the last `add`."""
        if not isinstance(self._one, tf.IndexedSlices):
            return after
        values, indices = (array.concat() for array in after)
        return tf.IndexedSlices(values, indices, tf.shape(self._weight))


class SharedSlices:
    """Gathers slices of sparse gradients from all processes, by padding and summing them.

    Every process has to create it at the same point of the step.
    """

    def __init__(self, group: Any, gradients: Sequence[tf.IndexedSlices]) -> None:
        self._gradients = gradients
        self.own: list[Any] = []
        self._totals: list[Any] = []
        if not gradients:
            return
        counts = [tf.shape(gradient.indices, tf.int64)[0] for gradient in gradients]
        sent = [tf.one_hot(group.rank, group.size, count, 0, dtype=tf.int64) for count in counts]
        for gradient, summed in zip(gradients, group.sum(sent), strict=True):
            total = tf.reduce_sum(summed)
            start = tf.reduce_sum(summed[: group.rank])
            # one more row, because there may be no slice at all
            self.own += [
                pad_rows(leaf, start, total + 1) for leaf in (gradient.values, gradient.indices)
            ]
            self._totals.append(total)

    def join(self, sums: Sequence[Any]) -> list[tf.IndexedSlices]:
        """Return the gradients with the slices of all processes.

        `sums` has the tensors of the attribute `own`, summed over all processes.
        """
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return [
            tf.IndexedSlices(values[:total], indices[:total], gradient.dense_shape)
            for gradient, total, (values, indices) in zip(
                self._gradients, self._totals, pairs, strict=True
            )
        ]


class SharedGradients:
    """Adds up dense and sparse gradients over all processes; any gradient may be None."""

    def __init__(self, gradients: Sequence[Any]) -> None:
        self._count = len(gradients)
        reached = {
            place: gradient for place, gradient in enumerate(gradients) if gradient is not None
        }
        self._sparse = {
            place: each for place, each in reached.items() if isinstance(each, tf.IndexedSlices)
        }
        self._dense = {place: each for place, each in reached.items() if place not in self._sparse}
        slices = [each.values for each in self._sparse.values()]
        self.values = [*self._dense.values(), *slices]
        self._slices: Any = None

    def prepare(self, group: Any) -> list[Any]:
        """Return this process's tensors, which have to be summed over all processes.

        Every process has to call this.
        """
        # dense gradients from the last layer to the first, as the backward pass computes them
        self._slices = SharedSlices(group, list(self._sparse.values()))
        return [*self._slices.own, *reversed(self._dense.values())]

    def join(self, sums: Sequence[Any]) -> list[Any]:
        """Return the gradients of the whole batch; None stays None.

        `sums` are the tensors from `prepare`, summed over all processes.
        """
        end = len(self._slices.own)
        joined = self._slices.join(sums[:end])
        whole = dict(zip(self._sparse, joined, strict=True))
        whole |= zip(reversed(self._dense), sums[end:], strict=True)
        return [whole.get(place) for place in range(self._count)]
