"""Checks whether a Keras model can train if each batch is divided among devices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NoReturn

import keras
import tensorflow as tf

from ..errors import RequestError
from ..training.launched import ask_for_processes


def model_digest(model: Any) -> str:
    """Return a digest of the shapes of a model's inputs and weights, as 16 hex digits.

    The weights' dtypes and `trainable` are included, but not their names.
    """
    inputs = [str(tuple(each.shape)) for each in getattr(model, "inputs", None) or []]
    weights = [
        f"{tuple(weight.shape)}:{weight.dtype}:{weight.trainable}" for weight in model.weights
    ]
    return blake2b("\n".join(["keras", *inputs, *weights]).encode(), digest_size=8).hexdigest()


TOWERS = "Use engine='towers', which computes the loss on the whole batch."
NO_PASSES = "Make a plan without passes: evener balance --micro off."


class SplitWarning(UserWarning):
    """Category of the warnings that evener issues about a Keras model."""


def warn(sentence: str) -> None:
    """Issue a SplitWarning with this message."""
    warnings.warn(sentence, SplitWarning, stacklevel=3)


def check_backend() -> None:
    """Raise RequestError if Keras doesn't run on TensorFlow."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise RequestError(
            f"Keras runs on {backend} here, and a split needs TensorFlow.",
            ("Set KERAS_BACKEND=tensorflow, or use evener.torch for a training loop in PyTorch."),
        )


def check_model(model: Any) -> None:
    """Raise RequestError if `model` isn't a Keras model."""
    if not isinstance(model, keras.Model):
        raise RequestError(
            f"A split takes a Keras model, not {type(model).__name__}.",
            "Give build() a compiled model, or a function that returns one.",
        )


def check_compiled(model: Any) -> None:
    """Raise RequestError if the model isn't compiled."""
    if not model.compiled:
        raise RequestError(
            "The model isn't compiled.", "Call model.compile(optimizer, loss) before fit."
        )


def check_step(model: Any) -> None:
    """Raise RequestError if the model isn't compiled or has stateful layers."""
    check_compiled(model)
    for layer in all_layers(model):
        if getattr(layer, "stateful", False):
            raise RequestError(
                f"{layer.name} keeps a state for each row from batch to batch "
                f"(stateful=True), so no batch can be cut.",
                "Make it with stateful=False, or train on one device.",
            )


def check_test_step(model: Any) -> None:
    """Raise RequestError if the user's class overrides `test_step`."""
    if overrides(model, "test_step"):
        raise RequestError(
            f"{type(model).__name__} has a test_step of its own, which engine='multiworker' "
            f"would replace.",
            "Use engine='towers', which runs it whole on the first device.",
        )


def check_towers(model: Any) -> None:
    """Raise RequestError if the model can't train on several devices in one process.

    Also warn if batch normalization will see only the rows of one device.
    """
    check_step(model)
    for layer in list_normalizations(model, synchronized=True)[:1]:
        refuse_in_one_process(
            f"{layer.name} synchronizes its statistics, which towers can't.", "synchronized=False"
        )
    _warn_local_statistics(model)


def check_workers(model: Any) -> None:
    """Raise RequestError if the model can't train in several processes, each with some rows.

    Also warn if batch normalization will see only the rows of one device.
    """
    check_step(model)
    _warn_local_statistics(model)


def check_passes(model: Any, rows: int) -> None:
    """Raise RequestError if the model can't train in gradient-accumulation passes.

    Also warn if batch normalization will see only the rows of one pass. `rows` is the row count of
    the largest pass, for this warning.
    """
    check_compiled(model)
    if model.run_eagerly:
        raise RequestError(
            "Passes are a loop of one graph, and can't run eagerly.",
            f"Compile with run_eagerly=False. {NO_PASSES}",
        )
    for layer in list_normalizations(model, synchronized=True):
        raise RequestError(
            f"{layer.name} synchronizes its statistics, which passes can't.", NO_PASSES
        )
    if any(layer.trainable for layer in list_normalizations(model, synchronized=False)):
        warn(f"Batch normalization sees one pass of {rows} rows, not the whole share.")


def check_assigned(weights: Sequence[Any]) -> None:
    """Raise RequestError if a call of the model has assigned trainable weights.

    `weights` lists the trainable weights that the call has assigned; it is empty if there are none.
    """
    # such an assignment would be lost, because each device has its own copy of the weights
    if weights:
        seen = (
            f"A call of the model assigns {weights[0].path}, as SpectralNormalization does; "
            f"towers can't keep that."
        )
        refuse_in_one_process(seen, "leave that layer out")


def refuse_in_one_process(seen: str, other: str) -> NoReturn:
    """Raise RequestError because this model needs several processes.

    `seen` says why. `other` names an alternative to starting several processes. If `evener launch`
    started this script as a single process, exit instead, so that it starts one process for each
    device.
    """
    ask_for_processes(seen)
    raise RequestError(seen, f"Start a process for each device (engine='multiworker'), or {other}.")


def warn_small_data(rows: int, planned: int | None) -> None:
    """Warn if the data have fewer rows than the plan's global batch, `planned`."""
    if planned is not None and rows < planned:
        warn(
            f"The data have {rows} rows, fewer than the plan's global batch of {planned}: "
            f"each step is smaller than "
            "those that the plan was measured with."
        )


def all_layers(model: Any) -> list[Any]:
    """Return the model's layers, including nested ones."""
    found: list[Any] = model._flatten_layers(include_self=False)
    return found


def plain_variables(model: Any) -> list[Any]:
    """Return the attributes of the model and its layers that are a `tf.Variable`."""
    every = [each for layer in (model, *all_layers(model)) for each in vars(layer).values()]
    return list({id(each): each for each in every if isinstance(each, tf.Variable)}.values())


def overrides(model: Any, name: str) -> bool:
    """Return whether the user's class overrides Keras' method `name`."""
    return getattr(type(model), name) not in (
        getattr(keras.Model, name),
        getattr(keras.Sequential, name),
    )


def list_normalizations(model: Any, synchronized: bool | None = False) -> list[Any]:
    """Return the batch normalization layers whose option `synchronized` has this value.

    If it is None, return all batch normalization layers.
    """
    found = [
        each for each in all_layers(model) if isinstance(each, keras.layers.BatchNormalization)
    ]
    return [each for each in found if synchronized in (None, each.synchronized)]


def list_normalization_states(model: Any, synchronized: bool | None = False) -> list[Any]:
    """Return the moving averages of batch normalization layers.

    Only layers whose option `synchronized` has this value are included; None includes all.
    """
    layers = list_normalizations(model, synchronized)
    return [state for layer in layers for state in layer.non_trainable_variables]


def _warn_local_statistics(model: Any) -> None:
    local = [layer for layer in list_normalizations(model, synchronized=False) if layer.trainable]
    if local:
        warn(
            f"{local[0].name} takes its statistics from each device's own rows, not from the "
            f"whole batch; "
            "synchronized=True with engine='multiworker' uses the whole batch."
        )
