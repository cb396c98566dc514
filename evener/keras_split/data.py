"""Arrays as a dataset of whole global batches, in an order that every process of a group can repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evener.errors import RequestError


def batches(x: Any, y: Any, weight: Any, batch: int, shuffle: bool, seed: int) -> Any:
    """A tf.data.Dataset of (x, y, weight), as far as they are given, `batch` rows each and the rest in a last one."""
    if y is None and weight is not None:
        raise RequestError("Sample weights are given without y.", "Give y too.")
    given = [each for each in (x, y, weight) if each is not None]
    rows = length(given)
    with tf.device("CPU:0"):
        held = keras.tree.map_structure(tf.convert_to_tensor, tuple(given))
    order = tf.data.Dataset.range(rows)
    if shuffle:
        order = order.shuffle(rows, seed=seed, reshuffle_each_iteration=True)

    def take(indices: Any) -> Any:
        with tf.device("CPU:0"):
            return keras.tree.map_structure(lambda tensor: tf.gather(tensor, indices), held)

    dataset = order.batch(batch).map(take, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return dataset.prefetch(tf.data.AUTOTUNE)


def length(data: Any) -> int:
    """Rows of nested arrays; RequestError if they differ or there are none."""
    counts = {int(array.shape[0]) for array in keras.tree.flatten(data) if array is not None}
    if len(counts) != 1:
        raise RequestError(f"The arrays have {sorted(counts)} rows.", "Give arrays of as many rows each.")
    (rows,) = counts
    if rows == 0:
        raise RequestError("The arrays have no rows.", "Give at least one sample.")
    return rows


def fold_weights(y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None) -> Any:
    """`class_weight` as sample weights, as Keras does it: by the label, or the column of a one-hot row."""
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise RequestError("Both class_weight and sample_weight are given.", "Give one of them.")
    labels = np.asarray(y)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        labels = labels.argmax(-1)
    labels = labels.reshape(len(labels), -1)
    if labels.shape[1] != 1:
        raise RequestError("class_weight needs one label for each sample.", "Give sample_weight instead.")
    table = np.vectorize(lambda label: float(class_weight.get(int(label), 1.0)), otypes=[float])
    return table(labels[:, 0]).astype(keras.config.floatx())
