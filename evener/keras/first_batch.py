"""Reads the first batch of an iterator in advance, but leaves it available to the training."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any

import keras
import tensorflow as tf

from .data import AssignedArrays
from .keras_step import OwnRows, Tensors

PLAIN_SPECS = tf.TensorSpec | tf.SparseTensorSpec | tf.RaggedTensorSpec


def peek(batches: Any, steps: int) -> tuple[Tensors, Any]:
    """Return the first batch, and an iterable for one call of Keras' train or test function.

    The iterable yields up to `steps` batches, including the first. The first batch is None if there
    is none. It is also None if the elements aren't tensors; the iterable is then `batches` itself.
    """
    if not isinstance(batches, tf.data.Iterator):
        seen = list(islice(batches, steps))
        return (seen or [None])[0], seen
    if not all(isinstance(spec, PLAIN_SPECS) for spec in tf.nest.flatten(batches.element_spec)):
        return None, batches
    seen = list(islice(batches, steps))

    with tf.device("CPU:0"):
        again = iter(_make_dataset(seen, batches.element_spec))
    return (seen or [None])[0], again


def _make_dataset(seen: list[Tensors], spec: Any) -> Any:
    """Return a dataset of the batches `seen`, which were already read from an iterator.

    `spec` is the iterator's element spec, which the dataset keeps.
    """
    # axes of unknown length must stay unknown, because the step is traced with this spec

    def repeat() -> Iterator[Any]:
        yield from seen

    if seen and all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank is not None
        for leaf in tf.nest.flatten(spec)
    ):
        other = tf.nest.map_structure(_make_other_size, spec, seen[0])
        every = [tf.data.Dataset.from_tensors(each) for each in seen]
        joined = functools.reduce(
            lambda one, more: one.concatenate(more),
            every,
            tf.data.Dataset.from_tensors(other).take(0),
        )
        if joined.element_spec == spec:
            return joined  # without a function to trace
    return tf.data.Dataset.from_generator(repeat, output_signature=spec)


def _make_other_size(spec: Any, tensor: Any) -> Any:
    """Return zeros shaped like `tensor`, but longer or shorter along axes of unknown length.

    A dataset with both tensors then has unknown lengths in its element spec too.
    """
    sizes = zip(spec.shape, tensor.shape, strict=True)
    return tf.zeros([int(have == 0) if size is None else size for size, have in sizes], spec.dtype)


def read_triple(batch: Tensors) -> Tensors:
    """Return a batch's inputs, labels and weights as tensors, or None where they are missing."""
    data = batch.data if isinstance(batch, OwnRows | AssignedArrays) else batch
    return tf.nest.map_structure(_to_tensor, keras.utils.unpack_x_y_sample_weight(data))


def _to_tensor(each: Any) -> Any:
    """Return the value as a tensor; None, sparse and ragged tensors stay as they are."""
    if each is None or isinstance(each, tf.SparseTensor | tf.RaggedTensor):
        return each
    return tf.convert_to_tensor(each)
