"""Keras' own step: the parts of it that every engine keeps, and engine solo, which runs it on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from evener.keras_split.compatibility import check_assigned, warn_added_losses
from evener.keras_split.nested_rows import Tensors


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
