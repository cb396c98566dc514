"""Keras' own step: the parts of it that every engine keeps, and engine solo, which runs it on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from evener.keras_split.compatibility import all_layers, check_assigned, warn_added_losses
from evener.keras_split.nested_rows import Tensors

HEADROOM = 16.0  # a power of two, which rounds nothing


def call_model(model: Any, x: Tensors, training: bool) -> Tensors:
    """The model on these rows; `training` is passed only to a `call` that has that argument."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def call_on_copies(
    model: Any, x: Tensors, training: bool, copies: Sequence[Any], states: Sequence[tuple[Any, Any]]
) -> tuple[Tensors, list[Any], list[Any], Any]:
    """The model with these weights and states: outputs, losses that it added, regularizers, scope of its updates."""
    weights = list(zip(model.trainable_variables, copies, strict=True))
    with keras.StatelessScope(state_mapping=[*weights, *states], collect_losses=True) as scope:
        outputs = call_model(model, x, training)
        losses = list(model.losses)
    check_assigned([weight for weight, copy in weights if scope.get_current_value(weight) is not copy])
    regularized = sum(getattr(weight, "regularizer", None) is not None for weight in model.trainable_weights)
    end = len(losses) - regularized  # regularizers come last
    warn_added_losses(model, end)
    return outputs, losses[:end], losses[end:], scope


def loss_with(
    model: Any, added: Sequence[Any], x: Tensors, y: Tensors, outputs: Tensors, weight: Any, training: bool
) -> Any:
    """The model's loss with these in place of `model.losses`, unless there are none."""
    model._losses_override.extend(added)  # what `model.losses` is while it isn't empty
    try:
        return model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=training)
    finally:
        model._losses_override.clear()


def scale_loss(model: Any, loss: Any) -> Any:
    """As the optimizer scales it against small halves, with headroom for parts that are larger than their sum."""
    return model.optimizer.scale_loss(loss) / _headroom(model)


def apply_gradients(model: Any, gradients: Sequence[Any]) -> None:
    """Update the trainable weights by the sums of gradients of `scale_loss`, which overflow where one device's do."""
    headroom, weights = _headroom(model), model.trainable_weights
    if headroom > 1:
        halves = [layer for layer in all_layers(model) if layer.compute_dtype == "float16"]
        half = {id(weight) for layer in halves for weight in layer._trainable_variables}
        pairs = zip(gradients, weights, strict=True)
        gradients = [_give_back(gradient, headroom, id(weight) in half) for gradient, weight in pairs]
    if weights:
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))


def _headroom(model: Any) -> float:
    return HEADROOM if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) else 1.0


def _give_back(gradient: Any, headroom: float, is_half: bool) -> Any:
    """Times the headroom; not a number where a half would be infinite."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * headroom, gradient.indices, gradient.dense_shape)
    gradient *= headroom
    return gradient + 0 * tf.cast(tf.cast(gradient, tf.float16), gradient.dtype) if is_half else gradient


def update_metrics(
    model: Any, loss: Any, rows: Any, x: Tensors, y: Tensors, outputs: Tensors, weight: Any
) -> dict[str, Any]:
    """Count a loss that is the mean over `rows` in Keras' own tracker, and the batch in the model's metrics."""
    model._loss_tracker.update_state(loss, sample_weight=rows)
    logs: dict[str, Any] = model.compute_metrics(x, y, outputs, sample_weight=weight)
    return logs


class SingleDevice:
    """Keras' own steps, on a device that need not be TensorFlow's first."""

    name = "solo"

    def __init__(self, model: Any) -> None:
        self.model = model
