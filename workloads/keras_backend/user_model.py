"""Workloads made from the user's own function that returns a compiled Keras model.

Rows come from a function `training_data()` or `sample_batch(n)` in the same module. If it has
neither, random rows are generated from the model's input shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import keras
import numpy as np

from evener.errors import RequestError

from .. import user_code
from ..protocol import WorkerSetup, Workload
from .workload import KerasRecipe, KerasWorkload, SampleBatch


def build(name: str, setup: WorkerSetup, settings: Mapping[str, Any]) -> Workload:
    """Make a workload from the user's function, which has a name such as `train.py:build`."""
    return KerasWorkload(setup, partial(load_recipe, name, settings))


def load_recipe(name: str, settings: Mapping[str, Any]) -> KerasRecipe:
    """Call the user's function and return its model and data.

    If there is no `sample_batch`, random batches are generated from the model's input shapes.
    Raises `RequestError` if the result isn't a compiled Keras model, or if the module has a
    function `lengths`.
    """
    own = user_code.load(name, settings)
    model = own.result
    if not isinstance(model, keras.Model):
        raise RequestError(
            f"{name} returns {type(model).__name__}, not a Keras model.",
            "Return a compiled keras.Model, or name --framework torch for a torch module.",
        )
    if not model.compiled:
        raise RequestError(
            f"The model of {name} isn't compiled.", "Call model.compile(optimizer, loss)."
        )
    if own.lengths is not None:
        raise RequestError(
            f"{name} has lengths(), and a search assigns rows by their length in PyTorch only.",
            (
                "Remove it. By the plan's shares, split.data(..., lengths=) assigns padded rows "
                "in the training."
            ),
        )
    sample = (
        partial(noise_for, model)
        if own.sample_batch is None
        else partial(check_sample, name, own.sample_batch)
    )
    return KerasRecipe(model, sample, own.training_data)


def check_sample(name: str, sample_batch: SampleBatch, rows: int) -> tuple[Any, Any]:
    """Call the user's `sample_batch`, check its result, and return it.

    Raises `RequestError` if it isn't a pair, or if an array doesn't have `rows` rows.
    """
    batch = sample_batch(rows)
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise RequestError(f"sample_batch of {name} doesn't give a pair.", "Return (x, y).")
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in keras.tree.flatten(batch)}
    if counts != {rows}:
        raise RequestError(
            f"sample_batch({rows}) of {name} gives arrays of {sorted(counts)} rows.",
            f"Each array needs {rows} rows.",
        )
    return batch


def noise_for(model: Any, rows: int) -> tuple[Any, Any]:
    """Return a random batch that fits the model's inputs and losses.

    Raises `RequestError` if the model doesn't know its input shapes, or if an axis other than the
    first has no fixed length.
    """
    random = np.random.default_rng(rows)
    if not model.built or not model.inputs:
        raise RequestError(
            "The model doesn't say its input shapes.",
            "Begin it with keras.Input, or put sample_batch(n) beside it.",
        )
    inputs, answers = _structures(model)
    x = keras.tree.map_structure(lambda each: _input(random, rows, each, model), inputs)
    outputs = keras.tree.flatten(answers)
    losses = _loss_names(model, len(outputs))
    labels = [_label(rows, output, loss) for output, loss in zip(outputs, losses, strict=True)]
    return x, keras.tree.pack_sequence_as(answers, labels)


def _structures(model: Any) -> tuple[Any, Any]:
    """Return the model's inputs and outputs, nested in the same way as the data of a batch.

    For a Sequential model, returns its first input and first output. Such a model stores lists of
    them, although it is called with a single tensor.
    """
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def _input(random: Any, rows: int, tensor: Any, model: Any) -> Any:
    shape = _closed(tensor)
    kind = str(tensor.dtype)
    if "int" in kind:
        return random.integers(0, _vocabulary(model), (rows, *shape)).astype(kind)
    return random.standard_normal((rows, *shape)).astype(np.float32)


def _label(rows: int, tensor: Any, loss: str) -> Any:
    """Return labels that fit an output and its loss.

    They are 0 for a sparse loss, and otherwise one-hot.
    """
    shape = _closed(tensor)
    if "sparse" in loss:
        return np.zeros((rows, *shape[:-1]), np.int64)
    labels = np.zeros((rows, *shape), np.float32)
    labels[..., :1] = 1
    return labels


def _closed(tensor: Any) -> tuple[int, ...]:
    shape = tuple(tensor.shape[1:])
    if None in shape:
        raise RequestError(
            f"The shape {tuple(tensor.shape)} of {tensor.name} is open.",
            "Put sample_batch(n) beside your function.",
        )
    return shape


def _loss_names(model: Any, outputs: int) -> list[str]:
    given = [loss for loss in keras.tree.flatten(model.loss) if loss is not None] or ["none"]
    names = [
        loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
        for loss in given
    ]
    return names if len(names) == outputs else [names[0]] * outputs


def _vocabulary(model: Any) -> int:
    """Return the smallest vocabulary of the model's embeddings; 2 without embeddings.

    All embeddings accept token ids below it.
    """
    sizes = [layer.input_dim for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    return min(sizes, default=2)
