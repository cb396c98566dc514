"""What an engine can't train exactly: found before the first step, and said in a sentence with its remedy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from evener.errors import RequestError
from evener.keras_split.engines.keras_step import overrides

MEANS = ("sum_over_batch_size", "mean")
_TOWERS = "Use engine='towers', which computes the loss on the whole batch."


class SplitWarning(UserWarning):
    """The training will run, but something differs from what the plan or the user may expect."""


def check_backend() -> None:
    """Refuse Keras on another backend: the engines' steps are TensorFlow's."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise RequestError(
            f"Keras runs on {backend} here, and a split needs TensorFlow.",
            "Set KERAS_BACKEND=tensorflow, or take evener.torch_split for a training loop in PyTorch.",
        )


def check_model(model: Any) -> None:
    """Refuse what is no Keras model, such as what a function without a return gives."""
    if not isinstance(model, keras.Model):
        raise RequestError(
            f"A split takes a Keras model, not {type(model).__name__}.",
            "Return the compiled model from the function that build() calls.",
        )


def check_towers(model: Any) -> None:
    """Refuse what towers can't do; warn of what they do otherwise than one device."""
    check_step(model)
    for layer in layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise RequestError(
                f"{layer.name} synchronizes its statistics, which towers can't.",
                "Use engine='mirrored', or BatchNormalization(synchronized=False).",
            )
    _warn_local_statistics(model, "synchronized=True with engine='mirrored' uses the whole batch")


def check_workers(model: Any) -> None:
    """Refuse what a process per device can't do: it sees the loss of its own rows only."""
    check_step(model)
    _check_loss(model, "multiworker")
    _check_executions(model, "multiworker")
    if model.run_eagerly:
        raise RequestError("engine='multiworker' can't run eagerly.", "Compile with run_eagerly=False.")
    if any(isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized for layer in layers(model)):
        raise RequestError(
            "engine='multiworker' can't synchronize BatchNormalization.", "Use engine='mirrored' for that."
        )
    _warn_local_statistics(model, "engine='mirrored' with synchronized=True uses the whole batch")
    _warn_sparse(model)


def check_mirrored(model: Any) -> None:
    """Refuse what Keras does wrongly, or not at all, under a MirroredStrategy with unequal shares."""
    check_step(model)
    _check_loss(model, "mirrored")
    _check_executions(model, "mirrored")
    if model.jit_compile:
        raise RequestError(
            "engine='mirrored' can't run with jit_compile=True.", "Compile with jit_compile=False, or train on one GPU."
        )
    _check_optimizer(model.optimizer)
    _warn_local_statistics(model, "synchronized=True uses the whole batch")


def check_mask(outputs: Any, engine: str) -> None:
    """Refuse a mask that reaches the loss: its mean is over the valid steps of one replica, which rows don't count."""
    if any(getattr(tensor, "_keras_mask", None) is not None for tensor in keras.tree.flatten(outputs)):
        raise RequestError(f"engine='{engine}' can't weight a masked loss exactly.", _TOWERS)


def warn_added(model: Any, found: int) -> None:
    """Warn of losses that the model adds itself: nobody can tell a mean over rows from a sum."""
    regularized = sum(1 for layer in layers(model) if layer.activity_regularizer is not None)
    if found > regularized:
        warnings.warn(
            f"{model.name} adds losses of its own; each counts by its device's rows, as a mean over rows should.",
            SplitWarning,
            stacklevel=2,
        )


def check_assigned(weights: Sequence[Any]) -> None:
    """Refuse a model that gives its trainable weights new values as it is called: each device has a copy of them."""
    if weights:
        raise RequestError(
            f"A call of the model assigns {weights[0].path}, as SpectralNormalization does; towers can't keep that.",
            "Use engine='mirrored', whose replicas have weights of their own, or leave that layer out.",
        )


def warn_counted(state: Any) -> None:
    """Warn of a metric that the model updates as it is called: nobody can tell a mean over rows from rows."""
    metric = state.path.rpartition("/")[0]
    warnings.warn(
        f"{metric} is counted inside the model, once on each device: give that metric the rows, not their mean.",
        SplitWarning,
        stacklevel=2,
    )


def layers(model: Any) -> list[Any]:
    """Every layer of a model, those of inner models, of wrappers and of the user's own layers too."""
    found: list[Any] = model._flatten_layers(include_self=False)
    return found


def check_compiled(model: Any) -> None:
    """Refuse a model without a loss to train by."""
    if not model.compiled:
        raise RequestError("The model isn't compiled.", "Call model.compile(optimizer, loss) before fit.")


def check_test_step(model: Any, engine: str) -> None:
    """Refuse a test_step of the user's own where it would see one device's rows for the whole batch."""
    if overrides(model, "test_step"):
        raise RequestError(
            f"{type(model).__name__} has a test_step of its own, which engine={engine!r} would replace.",
            "Use engine='towers', which runs it whole on the first device.",
        )


def check_step(model: Any) -> None:
    """Refuse what no engine can split: a model without a loss, with a train_step of its own, with states of rows."""
    check_compiled(model)
    if overrides(model, "train_step"):
        raise RequestError(
            f"{type(model).__name__} has a train_step of its own, which a split would replace.",
            "Put its loss into compute_loss, or its loop around gradients that you weight yourself.",
        )
    for layer in layers(model):
        if getattr(layer, "stateful", False):
            raise RequestError(
                f"{layer.name} keeps a state for each row from batch to batch (stateful=True), so none can be cut.",
                "Make it with stateful=False, or train on one device.",
            )


def _check_executions(model: Any, engine: str) -> None:
    if model.steps_per_execution != 1:
        raise RequestError(
            f"engine='{engine}' can't run steps_per_execution={model.steps_per_execution}: TensorFlow fails there.",
            "Compile with steps_per_execution=1, or use engine='towers'.",
        )


def _check_loss(model: Any, engine: str) -> None:
    if overrides(model, "compute_loss"):
        raise RequestError(f"{type(model).__name__} has a compute_loss of its own, unseen by {engine!r}.", _TOWERS)
    for loss in keras.tree.flatten(model.loss):
        if not isinstance(loss, keras.losses.Loss):
            continue  # a name or a function: Keras takes the mean over its rows
        if loss.reduction not in MEANS:
            raise RequestError(
                f"engine='{engine}' can't weight the loss {loss.name} with reduction={loss.reduction!r}.",
                f"Use reduction='sum_over_batch_size'. {_TOWERS}",
            )
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise RequestError(f"The loss {loss.name} reduces its rows by a way of its own.", _TOWERS)
    if len(getattr(model, "outputs", None) or []) > 1:
        warnings.warn(
            f"With engine='{engine}' the losses shown for single outputs are means over the devices; `loss` is exact.",
            SplitWarning,
            stacklevel=3,
        )


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise RequestError(
            "engine='mirrored' can't scale the loss: Keras looks for overflow on the first replica only.",
            "Use engine='towers', or mixed_bfloat16.",
        )
    for name in ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps"):
        value = getattr(optimizer, name, None)
        if value is not None:
            raise RequestError(
                f"engine='mirrored' can't do {name}={value}: Keras applies it before the gradients are summed.",
                "Use engine='towers', or leave it out.",
            )


def _warn_sparse(model: Any) -> None:
    """Keras' adaptive optimizers square the rows of a sparse gradient one by one; a group has only their sum."""
    kind = type(model.optimizer)
    if issubclass(kind, keras.optimizers.SGD) or not kind.__module__.startswith("keras."):
        return
    for layer in layers(model):
        if isinstance(layer, keras.layers.Embedding) and layer.trainable:
            warnings.warn(
                f"{kind.__name__} takes {layer.name}'s gradient as a sum in a group, and word by word on one device: "
                "rows of words that come often in a batch learn at another pace. engine='towers' is as one device.",
                SplitWarning,
                stacklevel=2,
            )
            return


def _warn_local_statistics(model: Any, remedy: str) -> None:
    for layer in layers(model):
        local = isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
        if local and layer.trainable:
            warnings.warn(
                f"{layer.name} takes its statistics from each device's own rows, not from the whole batch; {remedy}.",
                SplitWarning,
                stacklevel=2,
            )
            return
