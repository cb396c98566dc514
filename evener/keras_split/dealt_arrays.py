"""Padded rows dealt by their lengths: each device computes rows of like length, cut to its own longest.

Outputs with a step for each token are padded again before the loss, which sees the whole batch as one device does. So
padding must count nothing: a row computes the same without it, and a mask or weights keep it from the loss.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ..errors import RequestError
from ..training.dealing import Dealer
from .compatibility import all_layers
from .engines.keras_step import call_model
from .nested_rows import Tensors, cut_rows

SAME = 1e-3  # outputs of a row that differ by less, relative to the largest, are the same

_MASK = "Mask it, as Embedding(mask_zero=True) and Masking do, or train without lengths."


class DealtArrays(NamedTuple):
    """A global batch, device after device."""

    data: Tensors
    edges: Any  # where the rows of each device begin, and where the last one's end
    longest: Any  # tokens of each device's longest row


def deal_arrays(dealer: Dealer, tokens: Any) -> tuple[Any, Any, Any]:
    """The order of a batch's rows, device after device, the edges between devices, and each one's longest row."""

    def deal(lengths: Any) -> tuple[Any, ...]:
        dealt = dealer.deal(lengths.tolist())
        own = [[row for each in passes for row in each] for passes in dealt.passes]
        edges = np.cumsum([0, *map(len, own)], dtype=np.int64)
        longest = [max((1, *(int(lengths[row]) for row in rows))) for rows in own]
        return np.array([row for rows in own for row in rows], np.int64), edges, np.array(longest, np.int64)

    order, edges, longest = tf.numpy_function(deal, [tokens], [tf.int64] * 3)
    devices = len(dealer.ranks)
    return tf.ensure_shape(order, [None]), tf.ensure_shape(edges, [devices + 1]), tf.ensure_shape(longest, [devices])


def read_lengths(lengths: Any, x: Tensors, rows: int, dealer: Dealer) -> Any:
    """The tokens of each row, as int64; RequestError unless they can be those of the padded arrays x."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(
            f"lengths={type(lengths).__name__} isn't a list of whole numbers.", "Give the tokens of each row, in order."
        )
    dealer.check(tokens.tolist(), rows)
    steps = _count_steps(x)
    if steps is None or tokens.max() > steps:
        held = "no second axis" if steps is None else f"a second axis of {steps}"
        raise RequestError(
            f"Row {int(tokens.argmax())} has {int(tokens.max())} tokens, but x has {held}.",
            "Give padded arrays, whose second axis is as long as the longest row.",
        )
    return tokens.astype(np.int64)


def cut_pieces(x: Tensors, dealt: DealtArrays) -> list[tuple[Tensors, Any]]:
    """Each device's rows of x, cut to their longest, and how many of them count."""
    with tf.device("CPU:0"):
        edges, longest = tf.unstack(dealt.edges), tf.unstack(dealt.longest)
        return [
            (cut_steps(cut_rows(x, start, stop), most), stop - start)
            for (start, stop), most in zip(pairwise(edges), longest, strict=True)
        ]


def cut_steps(x: Tensors, steps: Any) -> Tensors:
    """The first steps of every tensor whose second axis is as long as the first one's."""
    whole = _count_steps(x)
    return keras.tree.map_structure(
        lambda each: each[:, :steps] if each.shape.rank > 1 and each.shape[1] == whole else each, x
    )


def pad_steps(outputs: Tensors, x: Tensors) -> Tensors:
    """Outputs of cut rows with as many steps as x has, where their number is open; masks leave the padding out."""
    whole = _count_steps(x)

    def pad(tensor: Any) -> Any:
        if tensor.shape.rank < 2 or tensor.shape[1] is not None:
            return tensor
        width = [[0, 0], [0, whole - tf.shape(tensor)[1]]]
        padded = tf.pad(tensor, [*width, *([[0, 0]] * (tensor.shape.rank - 2))])
        padded.set_shape([None, whole, *tensor.shape[2:]])
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            padded._keras_mask = tf.pad(mask, width)
        return padded

    return keras.tree.map_structure(pad, outputs)


def check_padding(model: Any, batch: DealtArrays) -> None:
    """RequestError unless a row of the batch computes the same without its padding, and the loss leaves that out."""
    if model.run_eagerly:
        raise RequestError("Rows can't be dealt by length eagerly.", "Compile with run_eagerly=False.")
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in all_layers(model)):
        raise RequestError("Batch normalization counts padding in its statistics.", "Train without lengths.")
    x, _, weight = keras.utils.unpack_x_y_sample_weight(batch.data)
    longest, sizes = batch.longest.numpy(), np.diff(batch.edges.numpy())
    device = int(np.where(sizes > 0, longest, longest.max() + 1).argmin())
    place, steps = int(batch.edges[device]), int(longest[device])
    row, weights = (cut_rows(each, place, place + 1) for each in (x, weight))
    whole = keras.tree.flatten(call_model(model, row, False))
    try:
        short = keras.tree.flatten(call_model(model, cut_steps(row, steps), False))
    except (ValueError, tf.errors.OpError) as error:
        raise RequestError(
            f"{model.name} can't compute a row of {steps} tokens that isn't padded: {str(error).splitlines()[0]}",
            "Leave the length of its input open, as Input((None,)) does, or train without lengths.",
        ) from None
    for one, other in zip(whole, short, strict=True):
        _check_output(one, other, steps, keras.tree.flatten(weights))


def _check_output(whole: Any, short: Any, steps: int, weights: list[Any]) -> None:
    """RequestError unless an output of a padded row is that of the row without padding, which must count nothing."""
    if whole.shape != short.shape:
        counted = [getattr(whole, "_keras_mask", None), *(each for each in weights if each is not None)]
        marks = [tf.cast(each[:, steps:], tf.bool) for each in counted if each is not None and each.shape.rank > 1]
        if not marks or bool(tf.reduce_any(tf.reduce_all(tf.stack(marks), 0))):
            raise RequestError(
                "The loss counts padding: no mask reaches it, and no weights are 0 there.",
                "Mask it, as Embedding(mask_zero=True) does, or give a sample_weight for each token.",
            )
        whole = whole[:, :steps]
    one, other = np.asarray(whole, np.float64), np.asarray(short, np.float64)
    if one.shape != other.shape or np.abs(one - other).max(initial=0.0) > SAME * np.abs(one).max(initial=0.0):
        raise RequestError("The model computes another output for a row without its padding.", _MASK)


def _count_steps(x: Tensors) -> int | None:
    """The second axis of the first input; None if it has none."""
    shape = keras.tree.flatten(x)[0].shape
    return shape[1] if len(shape) > 1 else None
