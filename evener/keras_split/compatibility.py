"""Checks of models that an engine can't train exactly: they are refused before the first step, with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from ..errors import RequestError
from ..training.launched import ask_for_processes

MEANS = ("sum_over_batch_size", "mean")
TOWERS = "Use engine='towers', which computes the loss on the whole batch."
NO_PASSES = "Make a plan without passes: evener balance --micro off."


class SplitWarning(UserWarning):
    """The training will run, but something differs from what the plan or the user may expect."""


def warn(sentence: str) -> None:
    """Issue a SplitWarning; Python shows each sentence once."""
    warnings.warn(sentence, SplitWarning, stacklevel=3)


def check_backend() -> None:
    """Refuse Keras on another backend: the engines' steps are TensorFlow's."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise RequestError(
            f"Keras runs on {backend} here, and a split needs TensorFlow.",
            "Set KERAS_BACKEND=tensorflow, or use evener.torch_split for a training loop in PyTorch.",
        )


def check_model(model: Any) -> None:
    """Refuse what is not a Keras model, such as the result of a function without a return."""
    if not isinstance(model, keras.Model):
        raise RequestError(
            f"A split takes a Keras model, not {type(model).__name__}.",
            "Give build() a compiled model, or a function that returns one.",
        )


def check_compiled(model: Any) -> None:
    """Refuse a model without a loss to train by."""
    if not model.compiled:
        raise RequestError("The model isn't compiled.", "Call model.compile(optimizer, loss) before fit.")


def check_step(model: Any) -> None:
    """Refuse what no engine can split: a model without a loss, with a train_step of its own, with states of rows."""
    check_compiled(model)
    if overrides(model, "train_step"):
        raise RequestError(
            f"{type(model).__name__} has a train_step of its own, which a split would replace.",
            "Move its loss to compute_loss, or write a loop that weights the gradients itself.",
        )
    for layer in all_layers(model):
        if getattr(layer, "stateful", False):
            raise RequestError(
                f"{layer.name} keeps a state for each row from batch to batch (stateful=True), so no batch can be cut.",
                "Make it with stateful=False, or train on one device.",
            )


def check_test_step(model: Any, engine: str) -> None:
    """Refuse a test_step of the user's own where it would take one device's rows for the whole batch."""
    if overrides(model, "test_step"):
        raise RequestError(
            f"{type(model).__name__} has a test_step of its own, which engine={engine!r} would replace.",
            "Use engine='towers', which runs it whole on the first device.",
        )


def check_towers(model: Any) -> None:
    """Refuse what towers can't do; warn of what differs from one device."""
    check_step(model)
    _refuse_synchronized(model, "Use engine='mirrored', or BatchNormalization(synchronized=False).")
    _warn_local_statistics(model, "synchronized=True with engine='mirrored' uses the whole batch")


def check_workers(model: Any) -> None:
    """Refuse what a process per device can't do: it computes the loss of its own rows only."""
    _check_partial_loss(model, "multiworker")
    if model.run_eagerly:
        raise RequestError("engine='multiworker' can't run eagerly.", "Compile with run_eagerly=False.")
    _refuse_synchronized(model, "Use engine='mirrored' for that.")
    _warn_local_statistics(model, "engine='mirrored' with synchronized=True uses the whole batch")
    _warn_sparse(model)


def check_mirrored(model: Any) -> None:
    """Refuse what Keras does wrongly, or not at all, under a MirroredStrategy with unequal shares."""
    _check_partial_loss(model, "mirrored")
    _check_row_means(model)
    if model.jit_compile:
        raise RequestError(
            "engine='mirrored' can't run with jit_compile=True.", "Compile with jit_compile=False, or train on one GPU."
        )
    _check_optimizer(model.optimizer)
    _warn_local_statistics(model, "synchronized=True uses the whole batch")


# before an engine's first step
CHECKS = {
    "solo": check_compiled,
    "towers": check_towers,
    "mirrored": check_mirrored,
    "multiworker": check_workers,
}


def check_mask(outputs: Any) -> None:
    """Refuse a mask that reaches the loss: its mean is over a replica's valid steps, not over its rows."""
    if any(getattr(tensor, "_keras_mask", None) is not None for tensor in keras.tree.flatten(outputs)):
        raise RequestError("engine='mirrored' can't weight a masked loss exactly.", TOWERS)


def check_passes(model: Any, rows: int) -> None:
    """Refuse what is exact only where one loss is computed for a device's whole share; `rows`: of a pass."""
    check_compiled(model)
    if model.run_eagerly:
        raise RequestError("Passes can't run eagerly.", f"Compile with run_eagerly=False. {NO_PASSES}")
    if any(layer.trainable for layer in list_normalizations(model, synchronized=False)):
        warn(f"Batch normalization sees one pass of {rows} rows, not the whole share.")
    _warn_sparse(model)


def check_assigned(weights: Sequence[Any]) -> None:
    """Refuse a model that assigns its trainable weights when it is called: each device has a copy of them."""
    if weights:
        seen = f"A call of the model assigns {weights[0].path}, as SpectralNormalization does; towers can't keep that."
        ask_for_processes(seen)
        raise RequestError(
            seen,
            "Use engine='mirrored', whose replicas have weights of their own, or leave that layer out.",
        )


def warn_small_data(rows: int, planned: int | None) -> None:
    """Warn of data that never fill the plan's batch."""
    if planned is not None and rows < planned:
        warn(
            f"The data have {rows} rows, fewer than the plan's global batch of {planned}: each step is smaller than "
            "those that the plan was measured with."
        )


def warn_inner_metric(state: Any) -> None:
    """Warn of a metric that the model updates when it is called: it may be given rows, or a mean over them."""
    metric = state.path.rpartition("/")[0]
    warn(f"{metric} is updated inside the model, once on each device: give that metric the rows, not their mean.")


def warn_summed_metrics(model: Any) -> None:
    """Warn of metrics that aren't Keras' own, and may not add up over rows, where outputs can't be put together."""
    metrics = model._compile_metrics.metrics if model._compile_metrics else []
    own = [
        each.name for each in metrics if not (getattr(each, "_fn", None) or type(each)).__module__.startswith("keras.")
    ]
    if own:
        warn(
            f"The outputs are too large to be sent to every process for {own[0]}: each counts its own rows, and what "
            "is shown is right only for a metric that adds up over rows, as means and counts do."
        )


def all_layers(model: Any) -> list[Any]:
    """Every layer of a model, including those of inner models, of wrappers and of the user's own layers."""
    found: list[Any] = model._flatten_layers(include_self=False)
    return found


def overrides(model: Any, name: str) -> bool:
    """True if the model's class has a method of its own in place of Keras'."""
    return getattr(type(model), name) not in (getattr(keras.Model, name), getattr(keras.Sequential, name))


def _check_partial_loss(model: Any, engine: str) -> None:
    """Refuse what can't be computed where each device has the loss of its own rows only."""
    check_step(model)
    if model.steps_per_execution != 1:
        raise RequestError(
            f"engine='{engine}' can't run steps_per_execution={model.steps_per_execution}: TensorFlow fails there.",
            "Compile with steps_per_execution=1, or use engine='towers'.",
        )
    if engine == "mirrored" and len(getattr(model, "outputs", None) or []) > 1:
        warn(f"With engine='{engine}' the losses shown for single outputs are means over the devices; `loss` is exact.")


def _check_row_means(model: Any) -> None:
    """Refuse a loss that isn't known to be a mean over rows, which mirrored replicas scale."""
    who, remedy = "engine='mirrored'", TOWERS
    if overrides(model, "compute_loss"):
        raise RequestError(f"{who} can't use {type(model).__name__}'s own compute_loss.", remedy)
    for loss in keras.tree.flatten(model.loss):
        if not isinstance(loss, keras.losses.Loss):
            continue  # a name or a function: Keras takes the mean over its rows
        if loss.reduction not in MEANS:
            raise RequestError(
                f"{who} can't weight the loss {loss.name} with reduction={loss.reduction!r}.",
                f"Use reduction='sum_over_batch_size'. {remedy}",
            )
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            raise RequestError(f"The loss {loss.name} reduces its rows in its own way.", remedy)


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


def list_normalizations(model: Any, synchronized: bool | None = False) -> list[Any]:
    """The layers that normalize over rows: those of each replica, the synchronized ones, or with None all."""
    found = [each for each in all_layers(model) if isinstance(each, keras.layers.BatchNormalization)]
    return [each for each in found if synchronized in (None, each.synchronized)]


def _refuse_synchronized(model: Any, remedy: str) -> None:
    for layer in list_normalizations(model, synchronized=True):
        raise RequestError(f"{layer.name} synchronizes its statistics, which only engine='mirrored' can.", remedy)


def _warn_local_statistics(model: Any, remedy: str) -> None:
    local = [layer for layer in list_normalizations(model, synchronized=False) if layer.trainable]
    if local:
        warn(f"{local[0].name} takes its statistics from each device's own rows, not from the whole batch; {remedy}.")


def _warn_sparse(model: Any) -> None:
    """Keras clips and squares the rows of a sparse gradient one by one; here there is only their sum."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    kind = type(optimizer)
    clips = any(getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue"))
    if not kind.__module__.startswith("keras.") or (issubclass(kind, keras.optimizers.SGD) and not clips):
        return
    words = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding) and layer.trainable]
    if words:
        effect = "it is clipped otherwise" if clips else "words that are frequent in a batch learn at a different rate"
        warn(
            f"{kind.__name__} gets {words[0].name}'s gradient as one sum in a group or in passes, and word by word on "
            f"one device: {effect}. engine='towers' without passes does as one device does."
        )
