"""Figures of a group's whole batch: its metrics, in every process, and statistics of synchronized layers.

Outputs travel with the sum of the gradients, and each process counts the whole batch, so a metric may do anything with
its rows. If outputs are too large for that, each counts its own rows, and the states' gains are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import keras
import tensorflow as tf

from ..errors import RequestError
from .compatibility import overrides, warn_summed_metrics
from .group import Group
from .keras_step import Tensors, pad_rows, update_metrics

LARGEST_ROW = 1 << 16  # bytes of a row's outputs that are sent


class StepMetrics:
    """The metrics of one step, on `size` of its `rows` from `start` on; make it before the model is called on them.

    `before` has states by their id whose values have changed since the step began.
    """

    def __init__(self, model: Any, start: Any, size: Any, rows: Any, before: Mapping[int, Any]) -> None:
        self._model = model
        self._place = start, size, rows
        self._losses = model._compile_loss.metrics if model._compile_loss else []  # of single outputs
        own = [model._loss_tracker, model._compile_metrics, *self._losses]
        found = _read(metric for metric in model.metrics if not any(metric is each for each in own))
        self._gaining = [(state, before.get(id(state), value)) for state, value in found]
        self._outputs: Tensors = ()

    def own(self, x: Any, y: Any, outputs: Tensors, weight: Any) -> list[Any]:
        """The tensors that the processes have to sum: outputs, what own rows add to states, losses of outputs."""
        model, (start, size, rows) = self._model, self._place
        if model._compile_metrics is not None or overrides(model, "compute_metrics"):
            if _row_bytes(outputs) <= LARGEST_ROW:
                self._outputs = outputs
            else:
                self._count_own(x, y, outputs, weight)
        sent = [pad_rows(leaf, start, rows) for leaf in _leaves(self._outputs)]
        added = [tf.where(size > 0, state - before, tf.zeros_like(before)) for state, before in self._gaining]
        part = tf.cast(size, tf.float64) / tf.cast(rows, tf.float64)
        losses = [tf.where(size > 0, tf.cast(part, loss.dtype) * loss, 0) for _, loss in _read(self._losses)]
        return [*sent, *added, *losses]

    def _count_own(self, *batch: Any) -> None:
        tf.function(lambda: self._model.compute_metrics(*batch)).get_concrete_function()  # makes states, counts nothing
        warn_summed_metrics(self._model)
        self._gaining += _read([self._model._compile_metrics])
        self._model.compute_metrics(*batch)

    def finish(self, sums: Sequence[Any], loss: Any, x: Any, y: Any, weight: Any) -> dict[str, Any]:
        """Count the whole batch, given the sums of what `own` gave; `loss` is that of all rows."""
        left = iter(sums)
        sent = [next(left) for _ in _leaves(self._outputs)]
        for state, before in self._gaining:
            state.assign(before + next(left))
        for state, _ in _read(self._losses):
            state.assign(next(left))
        if sent:
            return update_metrics(self._model, loss, self._place[2], x, y, _pack(self._outputs, sent), weight)
        self._model._loss_tracker.update_state(loss, sample_weight=self._place[2])
        return dict(self._model.get_metrics_result())


def _read(metrics: Any) -> list[tuple[Any, Any]]:
    """The states of metrics with their values."""
    return [(state, tf.convert_to_tensor(state)) for metric in metrics for state in metric.variables]


def _row_bytes(outputs: Tensors) -> float:
    """The bytes of the outputs of one row; infinite where they can't be sent."""
    total = 0.0
    for leaf in keras.tree.flatten(outputs):
        kind = leaf.dtype
        known = isinstance(leaf, tf.Tensor) and (kind.is_floating or kind.is_integer or kind.is_bool)
        total += (leaf.shape[1:].num_elements() or math.inf) * kind.size if known else math.inf
    return total


def _leaves(outputs: Tensors) -> list[Any]:
    """Outputs one by one, and the masks that Keras has attached to them."""
    found: list[Any] = keras.tree.flatten(outputs)
    return found + [mask for leaf in found if (mask := getattr(leaf, "_keras_mask", None)) is not None]


def _pack(outputs: Tensors, leaves: Sequence[Any]) -> Tensors:
    """The structure of `outputs`, of these leaves and masks."""
    left = iter(leaves)
    own = keras.tree.flatten(outputs)
    found = [tf.ensure_shape(next(left), [None, *leaf.shape[1:]]) for leaf in own]
    for leaf, whole in zip(own, found, strict=True):
        if getattr(leaf, "_keras_mask", None) is not None:
            whole._keras_mask = next(left)
    return keras.tree.pack_sequence_as(outputs, found)


NORMALIZATION = keras.layers.BatchNormalization


@contextmanager
def whole_statistics(group: Group, size: Any) -> Iterator[None]:
    """Synchronized layers take the statistics of all processes' rows, of which `size` of this one's count."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def sum_all(*own: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        return group.sum(own), lambda *flows: group.sum(flows)

    own_moments = NORMALIZATION._moments

    def find_moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if not layer.synchronized:
            return tuple(own_moments(layer, inputs, mask))
        if mask is not None:
            raise RequestError(f"{layer.name} can't synchronize statistics of masked steps.", "Leave the mask out.")
        counts = tf.cast(size > 0, inputs.dtype)  # a filler row doesn't
        figures = (tf.ones_like(inputs), inputs, tf.square(inputs))
        rows, total, squares = sum_all(*(counts * tf.reduce_sum(each, layer._reduction_axes) for each in figures))
        mean = total / rows
        return mean, tf.maximum(squares / rows - tf.square(mean), 0.0)

    with patch.object(NORMALIZATION, "_moments", find_moments):
        yield
