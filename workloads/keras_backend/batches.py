"""The data of a Keras workload: endless batches, gathered by the same code as in its training.

`sample_batch` is called once, for more rows than fit into a processor's caches; they are used again and again in a
shuffled order; what the user's `training_data` gives is fed as a training would feed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evener.errors import RequestError
from evener.keras_split.data import ArrayBatches, array_rows, as_it_is
from evener.keras_split.split import Split

SampleBatch = Callable[[int], tuple[Any, Any]]  # n -> (x, y), n rows each
POOL_BYTES = 64 << 20
FEWEST_ROWS, MOST_ROWS = 64, 1 << 16


class Rows:
    """Arrays to train on: (x, y), or (x, y, weight). `made` are more of what a training has."""

    def __init__(self, arrays: tuple[Any, ...], made: bool = False) -> None:
        self._arrays = arrays
        self.count = 0 if made else array_rows(arrays)  # rows of an epoch; 0: unknown

    def batches(self, split: Split, batch: int) -> Any:
        """Endless global batches of a size, in the form that the split's steps take."""
        rows = batch * max(1, array_rows(self._arrays) // batch)
        return split.batches(ArrayBatches(self._arrays, batch, shuffle=True, rows=rows), endless=True)


class Stream:
    """Datasets to train on: `make` gives one by the rows of a batch; `count` as in `Rows`."""

    def __init__(self, make: Callable[[int], Any], count: int = 0) -> None:
        self._make = make
        self.count = count

    def batches(self, split: Split, batch: int) -> Any:
        """Batches as `Rows` has them; RequestError where the dataset's batches have other sizes."""
        data = self._make(batch)
        if not isinstance(data, tf.data.Dataset):
            raise RequestError(
                f"training_data() gives an object of type {type(data).__name__} for a batch of {batch}.",
                "Give a tf.data.Dataset.",
            )
        found = next((rows_in(element) for element in data.take(1)), 0)
        if found != batch:
            raise RequestError(
                f"training_data() gives a batch of {found} rows instead of {batch}.",
                "Batch by the size that it is called with, from a data set that has at least that many rows.",
            )
        return data.filter(as_it_is(lambda *each: tf.equal(tf.shape(first(each))[0], batch))).repeat()


def pool(sample_batch: SampleBatch) -> Rows:
    """Rows made by `sample_batch`, within a limit of memory."""
    few = as_arrays(sample_batch(2))
    row_bytes = max(1, sum(leaf.nbytes for leaf in keras.tree.flatten(few)) // 2)
    count = min(max(POOL_BYTES // row_bytes, FEWEST_ROWS), MOST_ROWS)
    with tf.device("CPU:0"):
        return Rows(keras.tree.map_structure(tf.convert_to_tensor, as_arrays(sample_batch(count))), made=True)


def as_training_data(given: Any) -> Rows | Stream:
    """The user's data in one form, from arrays, a tf.data.Dataset of single samples, or a function batch -> dataset."""
    if isinstance(given, tf.data.Dataset):
        rows = max(0, int(given.cardinality()))  # negative: unknown, or endless
        return Stream(lambda batch: given.batch(batch).prefetch(tf.data.AUTOTUNE), rows)
    if callable(given):
        return Stream(given)
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise RequestError(
            f"training_data() gives an object of type {type(given).__name__}.",
            "Return arrays (x, y), a tf.data.Dataset of single samples, or a function that makes one of n-row batches.",
        )
    return Rows(as_arrays(given))


def as_arrays(data: tuple[Any, ...]) -> Any:
    """Nested arrays as numpy's, floats in Keras' float type, as fit converts them."""

    def convert(each: Any) -> Any:
        array = np.asarray(each)
        return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array

    return keras.tree.map_structure(convert, tuple(data))


def first(data: Any) -> Any:
    """The first of nested tensors."""
    return tf.nest.flatten(data)[0]


def rows_in(element: Any) -> int:
    """Rows of a batch that a dataset gave; 0 for what is no batch."""
    shape = first(element).shape
    return int(shape[0]) if shape.rank else 0
