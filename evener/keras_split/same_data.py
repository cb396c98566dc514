"""Check that the processes of a group have the same data: digests of batches, compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ..errors import RequestError
from .data import array_rows

FEW = 64  # elements of a row that are digested in each step
MOST = 251  # digests, which any float has exactly


def digest(leaves: Sequence[Any], most: int = MOST) -> Any:
    """A number below `most` that these tensors have, as an int64 scalar tensor."""
    parts = [tf.io.serialize_tensor(leaf) for leaf in leaves]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(parts), most)


def digest_labels(data: Any) -> Any:
    """A digest of a batch's labels, or of its inputs without labels: every process may change inputs at random."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    with tf.device("CPU:0"):
        leaves = tf.nest.flatten(x if y is None else y, expand_composites=True)
        return digest([leaf if (leaf.shape[1:].num_elements() or FEW + 1) <= FEW else leaf[:1] for leaf in leaves])


def check_same_arrays(group: Any, data: Any, size: int, settings: Sequence[Any]) -> None:
    """RequestError, in every process of a group, unless all have arrays with this first batch, and these settings."""
    if group is None:
        return
    rows = tf.nest.flatten([array[:size] for array in keras.tree.flatten(data)], expand_composites=True)
    own = digest([*map(tf.convert_to_tensor, rows), tf.constant(repr([size, array_rows(data), *settings]))], 1 << 20)
    (found,) = group.sum_now([tf.one_hot(group.rank, group.size, tf.cast(own, tf.float32), 0.0)])
    refuse_other(int(tf.argmax(tf.cast(found != found[0], tf.int32))))


def refuse_other(rank: int) -> None:
    """RequestError for the first process that has other data than rank 0; 0 is none."""
    if rank:
        raise RequestError(
            f"Rank {rank} has other rows in a batch than rank 0, or batches them otherwise.",
            "Give every process the same data in the same order, as split.data(...) does: each takes its own rows.",
        )
