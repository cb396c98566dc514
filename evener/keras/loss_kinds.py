"""How the loss of a batch follows from its parts' losses, measured on existing outputs.

Labels of a single class or masks of equal length would hide what a loss is averaged over, so they
are changed until they reveal it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..training.loss_check import FLOAT32_ROUNDING, MIXED_ROUNDING, LossFigures, describe, judge
from .compatibility import COUNTS, OTHER, ROWS, SUM, plain_variables, warn, warn_loss_metric
from .equal_draws import kept_generators
from .keras_step import Tensors, cut_rows, loss_with, own_loss, take_rows


@contextmanager
def traceless(model: Any) -> Iterator[Any]:
    """Return a scope that collects what calls of the model assign and add to its loss.

    Variables, losses and random states are restored afterwards.
    """
    values = [(variable, variable.numpy()) for variable in plain_variables(model)]
    # regularizers that run in a scope see only the weights that the scope was given
    given = [
        (each, tf.convert_to_tensor(each))
        for each in model.trainable_weights
        if each.regularizer is not None
    ]
    scope = keras.StatelessScope(state_mapping=given, collect_losses=True)
    try:
        with kept_generators(), scope:
            yield scope
    finally:
        for variable, value in values:
            variable.assign(value)
        model._clear_losses()


ROUNDING = {"float64": MIXED_ROUNDING, "float32": FLOAT32_ROUNDING}

CLOSE = {"float64": 1e-10}  # relative tolerance for values that aren't tried with other labels


def judge_loss(
    model: Any,
    data: Tensors,
    call: Any,
    leave: Sequence[Callable[[], None]],
    edges: Sequence[int],
    training: bool,
    batch: int,
) -> tuple[str, str]:
    """Return the kind of the model's loss on these rows; if it is OTHER, with a message.

    `call` has the outputs of a call on all rows and the losses of layers. Each function in `leave`
    restores the attributes that this call, or one of the calls on the parts, has left. `batch` is
    the number of rows of the batch, 0 if unknown.
    """
    x, y, weight = data
    outputs, losses = call.outputs, call.losses
    left: list[str] | None = None
    for number, changed in enumerate(_variants(model, y, outputs, weight)):
        try:
            figures, together = _read(model, x, changed, losses, edges, training, leave)
        except Exception as error:
            if number:
                continue
            said = first_line(error)
            leave[0]()
            if _is_computed(model, (*data, outputs), losses, training):
                return (
                    OTHER,
                    (
                        f"The loss of {edges[-1]} rows can be computed, but not of {edges[1]} of "
                        f"them: {said}"
                    ),
                )
            if edges[-1] < batch:
                return OTHER, f"The loss of {edges[-1]} of {batch} rows can't be computed: {said}"
            warn(f"{model.name}'s loss couldn't be checked before its first step: {said}")
            return ROWS, ""
        whole, apart = (
            figures.whole,
            abs(together - figures.whole - sum(float(tf.reduce_sum(loss)) for loss in losses)),
        )
        if not np.isfinite(whole):
            continue
        if apart > figures.rounding * max(abs(together), abs(whole)):
            return (
                OTHER,
                _name_fault(model, (x, *changed), losses, training),
            )
        kinds = [
            *judge(figures).mean_over,
            *([SUM] if _is_sum(whole, figures.parts, figures.rounding) else []),
        ]
        left = [kind for kind in (kinds if left is None else left) if kind in kinds]
        if not left:
            return OTHER, describe(figures)
    kinds = left or [ROWS]
    return next((kind for kind in (*COUNTS, ROWS, SUM) if kind in kinds), ROWS), ""


def _name_fault(model: Any, batch: Sequence[Any], losses: Sequence[Any], training: bool) -> str:
    """Return a message: why a loss isn't the sum of the rows' own loss and the layers' losses."""
    x, y, outputs, weight = batch
    with traceless(model):
        first, again = (
            float(own_loss(model, losses, (x, y, outputs, weight), training)) for _ in range(2)
        )
    if first != again:
        return (
            f"The loss of the same rows is another when it is computed again: {first:.6g}, then "
            f"{again:.6g}. It keeps a state of its own, which would go by a part of the rows."
        )
    return f"{type(model).__name__}.compute_loss doesn't just add the losses of its layers."


def _warn_of_metrics(model: Any, scope: Any) -> None:
    """Warn about metrics, other than those Keras adds, that the loss has updated in this scope."""
    kept = [model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss else [])]
    own = {id(state) for metric in kept for state in metric.variables}
    for state in model.metrics_variables:
        if id(state) in scope.state_mapping and id(state) not in own:
            warn_loss_metric(state)


def kind_of(whole: float, parts: Sequence[float], sizes: Sequence[int]) -> str:
    """Return how a value adds up over parts: ROWS, SUM or OTHER."""
    rounding = CLOSE.get(keras.config.floatx(), FLOAT32_ROUNDING)
    if judge(LossFigures(whole, tuple(parts), {ROWS: tuple(sizes)}, rounding)).mean_over:
        return ROWS
    return SUM if _is_sum(whole, parts, rounding) else OTHER


def count_all(model: Any, y: Tensors, outputs: Tensors, weight: Any) -> dict[str, Any]:
    """Count the units other than rows that a mean may be over, as float tensors by name."""
    found = {}
    masks = [getattr(each, "_keras_mask", None) for each in keras.tree.flatten(outputs)]
    mask = next((each for each in masks if each is not None), None)
    if mask is not None:
        found["steps"] = tf.reduce_sum(tf.cast(mask, tf.float64))
    ignored = getattr(model.loss, "ignore_class", None)
    if ignored is not None and tf.is_tensor(y):
        found["labels"] = tf.reduce_sum(tf.cast(y != tf.cast(ignored, y.dtype), tf.float64))
    if tf.is_tensor(weight):
        each = tf.cast(weight, tf.float64)
        if mask is not None:
            each = (
                tf.reshape(each, [-1, *[1] * (mask.shape.rank - 1)])
                if each.shape.rank == 1
                else each
            )
            each *= tf.cast(mask, tf.float64)
        found["weights"] = tf.reduce_sum(each)
    return found


def _read(
    model: Any,
    x: Tensors,
    changed: Tensors,
    losses: Sequence[Any],
    edges: Sequence[int],
    training: bool,
    leave: Sequence[Callable[[], None]],
) -> tuple[LossFigures, float]:
    """Return the losses of all rows and of each part, without and with the layers' losses.

    The loss with the layers' losses is that of all rows only.
    """
    figures, counts, totals = [], [], []
    ranges = [(0, edges[-1]), *pairwise(edges)]
    for (start, stop), leave_own in zip(ranges, leave, strict=True):
        leave_own()
        own, (y, outputs, weight) = (
            cut_rows(x, start, stop),
            [_cut_masked(each, start, stop) for each in changed],
        )
        with traceless(model) as scope:
            loss = own_loss(model, losses, (own, y, outputs, weight), training)
            _warn_of_metrics(model, scope)
            totals.append(
                float(
                    loss_with(model, losses, own, y, outputs, weight, training) if not start else 0
                )
            )
        figures.append(float(loss))
        counts.append(
            {ROWS: stop - start}
            | {name: float(n) for name, n in count_all(model, y, outputs, weight).items()}
        )
    whole, *parts = figures
    rounding = ROUNDING.get(loss.dtype.name, FLOAT32_ROUNDING)
    by_name = {name: tuple(float(each[name]) for each in counts[1:]) for name in counts[0]}
    return LossFigures(whole, tuple(parts), by_name, rounding), totals[0]


# Lines of an error that say where it was raised, not what it is.
PLACES = re.compile(
    r"^(Exception encounter|Graph execution error|Detected at node|<stack|File )|root error"
)


def first_line(error: Exception) -> str:
    """Return the message of an error of Keras or TensorFlow, without its location."""
    plain = re.sub(r"\x1b\[\d+m| ?\[Op:.*|\{\{.*?\}\} ?", "", str(error))
    lines = [re.sub(r"^\(\d+\) [A-Z_]+:", "", line.strip()).strip() for line in plain.splitlines()]
    said = [line for line in lines if line and not PLACES.search(line)]
    return said[0] if said else type(error).__name__


def _is_computed(model: Any, batch: Sequence[Any], losses: Sequence[Any], training: bool) -> bool:
    """True if the loss of the whole batch can be computed; if not, the step will report why."""
    x, y, weight, outputs = batch
    with traceless(model), suppress(Exception):
        own_loss(model, losses, (x, y, outputs, weight), training)
        return True
    return False


def _cut_masked(data: Tensors, start: int, stop: int) -> Tensors:
    """Return rows with their masks; raise ValueError for a scalar, which has no rows."""
    if any(tf.is_tensor(each) and each.shape.rank == 0 for each in keras.tree.flatten(data)):
        raise ValueError("An output of the model is a single number, which no rows have a part of.")
    cut = cut_rows(data, start, stop)
    for one, part in zip(keras.tree.flatten(data), keras.tree.flatten(cut), strict=True):
        if (mask := getattr(one, "_keras_mask", None)) is not None:
            part._keras_mask = mask[start:stop]
    return cut


def _is_sum(whole: float, parts: Sequence[float], rounding: float) -> bool:
    return abs(whole - sum(parts)) <= rounding * max(abs(whole), *map(abs, parts))


def _variants(
    model: Any, y: Tensors, outputs: Tensors, weight: Any
) -> Iterator[tuple[Tensors, Tensors, Any]]:
    """Yield (y, outputs, weight) unchanged, then with changed masks, weights and labels."""
    yield y, outputs, weight
    if any(getattr(each, "_keras_mask", None) is not None for each in keras.tree.flatten(outputs)):
        yield y, _with_other_masks(outputs), weight
    if tf.is_tensor(weight):
        yield y, outputs, weight * tf.cast(_ramp(weight), weight.dtype)
    labels, found = keras.tree.flatten(y), keras.tree.flatten(outputs)
    if len(labels) != len(found) or not all(map(tf.is_tensor, labels)):
        return
    ignored = getattr(model.loss, "ignore_class", None)
    for change in (
        _other_labels,
        functools.partial(_padded_labels, 0 if ignored is None else ignored),
    ):
        pairs = zip(labels, found, strict=True)
        changed = [tf.cast(change(np.asarray(own), output), own.dtype) for own, output in pairs]
        yield keras.tree.pack_sequence_as(y, changed), outputs, weight


def _ramp(values: Any) -> Any:
    """Return a factor for each row, growing from 0.1 to 2."""
    return np.linspace(0.1, 2.0, len(values)).reshape(-1, *[1] * (len(values.shape) - 1))


def _are_whole(y: Any) -> bool:
    return bool(y.dtype.kind in "iu" or (y.dtype.kind == "f" and (y == np.round(y)).all()))


def _other_labels(y: Any, outputs: Any) -> Any:
    """Return labels of a different class in each row, or values that grow from row to row."""
    rows = np.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1))
    classes = int(outputs.shape[-1]) if outputs.shape.rank > 1 else 1
    if not _are_whole(y):
        return y * _ramp(y) if y.dtype.kind == "f" else y
    if y.min() < 0 or y.max() >= max(classes, 2):
        return y
    one_hot = y.ndim > 1 and y.shape[-1] == classes > 1
    return (
        np.take_along_axis(y, (np.arange(classes) - rows) % classes, -1)
        if one_hot
        else (y + rows) % max(classes, 2)
    )


def _padded_labels(padding: int, y: Any, _outputs: Any) -> Any:
    """Return integer labels with more padding in each row than in the one before."""
    if not _are_whole(y) or y.ndim < 2 or y.shape[-1] < 2:
        return y
    rows = np.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1))
    return np.where(np.cumsum(np.ones_like(y), axis=-1) > 1 + rows % y.shape[-1], padding, y)


def _with_other_masks(outputs: Tensors) -> Tensors:
    """Return a copy of the outputs whose masks keep the first 1, 2, 3... steps of their rows."""
    changed = take_rows(outputs, len(keras.tree.flatten(outputs)[0]))
    for each in keras.tree.flatten(changed):
        mask = getattr(each, "_keras_mask", None)
        if mask is not None and mask.shape.rank > 1:
            rows, steps = np.indices(mask.shape)[:2]
            each._keras_mask = tf.constant(steps <= rows % mask.shape[1])
    return changed
