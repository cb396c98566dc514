"""Keras' own step: the parts of it that every engine keeps, and engine solo, which runs it on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from ..compatibility import all_layers, check_assigned, warn
from ..nested_rows import Tensors
from ..part_kinds import SUM, PartKinds

in_step = ContextVar("in_step", default=False)  # True while an engine calls the model

HEADROOM = 16.0  # a power of two, which rounds nothing


def call_model(model: Any, x: Tensors, training: bool) -> Tensors:
    """The model on these rows; `training` is passed only to a `call` that has that argument."""
    token = in_step.set(True)
    try:
        return model(x, training=training) if model._call_has_training_arg else model(x)
    finally:
        in_step.reset(token)


def warn_of_own_loop(model: Any) -> Callable[..., Any]:
    """The model's own `call`, with a warning where a loop of the user's trains by it, whole and on one device."""
    own = type(model).call

    @functools.wraps(own)
    def call(*given: Any, **words: Any) -> Any:
        if words.get("training") and not in_step.get():
            warn(
                f"{model.name} is called with training=True outside fit, and one device computes the whole batch. "
                "Put the loop's loss into compute_loss, and call fit or train_on_batch."
            )
        return own(model, *given, **words)

    return call


def call_on_copies(
    model: Any, x: Tensors, training: bool, copies: Sequence[Any], states: Sequence[tuple[Any, Any]]
) -> tuple[Tensors, list[Any], list[Any], Any]:
    """The model with these weights and states: outputs, losses that it added, regularizers, scope of its updates."""
    weights = list(zip(model.trainable_variables, copies, strict=True))
    with keras.StatelessScope(state_mapping=[*weights, *states], collect_losses=True) as scope:
        outputs = call_model(model, x, training)
        losses = list(model.losses)
    check_assigned([weight for weight, copy in weights if scope.get_current_value(weight) is not copy])
    return outputs, *split_losses(model, losses), scope


def split_losses(model: Any, losses: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The losses that layers added in a call, and the regularizers of weights, which come last."""
    regularized = sum(getattr(weight, "regularizer", None) is not None for weight in model.trainable_weights)
    end = len(losses) - regularized
    return list(losses[:end]), list(losses[end:])


def loss_with(
    model: Any, added: Sequence[Any], x: Tensors, y: Tensors, outputs: Tensors, weight: Any, training: bool
) -> Any:
    """The model's loss with these in place of `model.losses`, unless there are none."""
    model._losses_override.extend(added)  # what `model.losses` is while it isn't empty
    try:
        return model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=training)
    finally:
        model._losses_override.clear()


def part_of_loss(
    model: Any, found: PartKinds, losses: Sequence[Any], batch: Sequence[Any], training: bool, parts: tuple[Any, Any]
) -> Any:
    """The part of the whole batch's loss that these rows, (x, y, outputs, weight), add; `losses` are the model's own.

    `parts`: these rows / all rows, and the same of what the loss is a mean over. A filler row stands for no rows,
    as the loss of an empty batch need not be a number.
    """
    own = own_loss(model, losses, batch, training)
    total = own * tf.cast(parts[1], own.dtype)
    for place, loss in enumerate(losses):  # regularizers come last, and count by rows
        total += weigh_added(found.added_kind(place), loss, parts[0], own.dtype)
    return total


def own_loss(model: Any, losses: Sequence[Any], batch: Sequence[Any], training: bool) -> Any:
    """The model's loss on (x, y, outputs, weight) without those of its layers, `losses`."""
    x, y, outputs, weight = batch
    nothing = [tf.zeros([], losses[0].dtype)] if losses else []
    return loss_with(model, nothing, x, y, outputs, weight, training)


def weigh_added(kind: str, loss: Any, part: Any, dtype: Any) -> Any:
    """The part of the whole batch's loss that a layer's loss on some of the rows adds."""
    return tf.reduce_sum(tf.cast(loss, dtype)) * tf.cast(main_part(kind, part), dtype)


def main_part(kind: str, part: Any) -> Any:
    """The weight of a figure of this part of the rows, where it adds up by rows or as a sum."""
    return tf.cast(part > 0, part.dtype) if kind == SUM else part


def scale_loss(model: Any, loss: Any) -> Any:
    """The loss as the optimizer scales it for float16, with headroom for parts that are larger than their sum."""
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
