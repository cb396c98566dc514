"""Trains users' programs with plain Keras and with shares of 6 : 2, and returns the result of each.

`exact` has the largest difference of weights and metrics, in float64; `refused` has the message
before the first step.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import msgspec
import numpy as np
import tensorflow as tf
from keras import layers

from evener.errors import EvenerError
from evener.keras import Split, SplitWarning, make_logical_cpus
from evener.keras.audit_step import PlainSteps, kept_attributes
from evener.keras.keras_step import open_rows
from evener.keras.measure_kinds import measure
from tests.support.keras_program_layers import (
    RANDOM_LAYERS,
    Counted,
    State,
    Watched,
    between,
    layer_programs,
)
from tests.support.keras_program_losses import FLOAT32_LOSSES, Made, loss_programs
from tests.support.keras_program_own import own_programs
from tests.support.keras_program_readers import reader_programs
from tests.support.keras_proofs import make_plan
from tests.support.keras_twice import difference, seeded, trace_faster

BATCH = 8
TAILS = {"one row": 17, "whole batches": 16, "three rows": 19}  # number of training rows


def programs() -> dict[str, Made]:
    """Return all programs by name."""
    return {**loss_programs(), **layer_programs(), **reader_programs(), **own_programs()}


def run_all(
    _rank: int,
    engines: dict[str, list[str]],
    tail: str,
    validated: Sequence[str] | None = None,
    unaudited: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the results of each engine's programs, in one process of one or several.

    The programs in `validated`, or all, are validated. Those of an engine in `unaudited` are
    trained without audits.
    """
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    if not any("multiworker" in engine for engine in engines):
        make_logical_cpus(2)
    splits = {
        name: Split(make_plan(6, 2, micros=(2, 2) if "passes" in name else None))
        for name in engines
    }
    trace_faster()
    every = programs()
    found: dict[str, dict[str, Any]] = {engine: {} for engine in engines}
    for name in every:
        program = Program(name, every[name], TAILS[tail], validated is None or name in validated)
        for engine, split in splits.items():
            if name in (engines[engine] or every):
                split.audited = name not in (unaudited or {}).get(engine, ())
                found[engine][name] = program.run(split)
    return found


def name_all(_rank: int) -> list[str]:
    """Return the names of all programs."""
    return list(programs())


class Program:
    """A program with its data, and the result of plain Keras."""

    def __init__(self, name: str, made: Made, rows: int, validated: bool) -> None:
        make, (x, y, words) = made
        self.name, self.make = name, make
        x, y, words = keras.tree.map_structure(
            lambda a: a[:rows] if hasattr(a, "shape") else a, (x, y, words)
        )
        held = (x, y, words["sample_weight"]) if "sample_weight" in words else (x, y)
        options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        if validated:
            options |= {"validation_data": held, "validation_batch_size": BATCH}
        self._fitted = {"x": x, "y": y, **options, **words}
        self._plain: Any = None

    def train(self, make: Any) -> Any:
        """Return the metrics and weights of a model that was made and trained."""
        model = seeded(make)
        if model.built:
            model.optimizer.build(model.trainable_variables)  # otherwise fit traces it twice
        return model.fit(**self._fitted).history, model.get_weights()

    def run(self, split: Split) -> dict[str, Any]:
        """Return the `verdict` with `gap`, or with the message."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                figures, weights = self.train(lambda: split.build(self.make))
            except EvenerError as error:
                return {"verdict": "refused", "said": str(error)}
            except Exception as error:
                return self._explain(error)
        said = [str(each.message) for each in seen if issubclass(each.category, SplitWarning)]
        answer: dict[str, Any] = {"verdict": "trained", "said": " ".join(dict.fromkeys(said))}
        answer |= {"random": self.name in RANDOM_LAYERS, "float32": self.name in FLOAT32_LOSSES}
        if split.group is not None and split.group.rank:
            return answer
        self._plain = self._plain or self.train(self.make)
        if self._plain[0].keys() != figures.keys():
            return answer | {"gap": math.inf}
        return answer | {"gap": difference(self._plain, (figures, weights))}

    def _explain(self, error: Exception) -> dict[str, Any]:
        """Return a crash, unless plain Keras ends with the same error."""
        try:
            self.train(self.make)
        except type(error):
            return {"verdict": "as Keras", "said": str(error).splitlines()[0]}
        except Exception as other:
            return {"verdict": "crash", "said": f"plain: {other!r}, split: {error!r}"}
        return {"verdict": "crash", "said": f"{error!r}"[-1500:]}


def run_towers(
    rank: int, engines: dict[str, list[str]], tail: str, unaudited: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return the results of programs in one process, and in `beside` the check's other effects."""
    return {**run_all(rank, engines, tail, (), unaudited), "beside": check_beside()}


def check_beside() -> dict[str, Any]:
    """Return what the check leaves behind, and its messages.

    The messages are about common float32 layers, and about a user's own loop.
    """
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    split = Split(make_plan(6, 2))
    make, (x, y, _) = loss_programs()["rmse"]
    rows = tf.constant(x, tf.float32), tf.constant(y, tf.float32), None
    found: dict[str, Any] = {"unseeded": _measure_loss(make(), rows).loss}
    found |= {"before": _draw(None), "after": _draw(_measure)}
    image = keras.Input((8, 8, 3))
    body = layers.Dropout(0.5)(
        layers.BatchNormalization()(layers.Conv2D(8, 3)(layers.RandomFlip()(image)))
    )
    attended = layers.MultiHeadAttention(2, 4, dropout=0.2)(*[layers.Reshape((36, 8))(body)] * 2)
    model = keras.Model(
        image, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(attended))
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    data = (tf.random.normal((24, 8, 8, 3)), tf.zeros([24], tf.int64), None)
    found["common"] = msgspec.to_builtins(_measure_loss(model, data))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        watched = split.build(make)
        watched.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        quiet = len([each for each in seen if "outside fit" in str(each.message)])
        watched(x[:BATCH], training=True)
    found["own loop"] = [quiet, sum("outside fit" in str(each.message) for each in seen)]
    return found


def _draw(action: Any) -> list[Any]:
    """Return a model's weights, states and next random numbers after an action on it.

    The model has weights, states and random numbers of all kinds.
    """
    keras.utils.set_random_seed(3)
    model = between(Counted, lambda: State("sums"), lambda: layers.Dropout(0.5), Watched)[0]()
    if action is not None:
        action(model)
    drawn = [
        random.random(),
        float(np.random.random()),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
    ]
    counted = [int(layer.calls) for layer in model.layers if isinstance(layer, Counted)]
    kept = [
        float(np.sum(tf.convert_to_tensor(each)))
        for each in (*model.variables, *model.metrics_variables)
    ]
    return [*drawn, *counted, *kept, model.optimizer.iterations.numpy().item(), len(model.losses)]


def _measure(model: Any) -> None:
    _measure_loss(model, (tf.random.stateless_normal((8, 6), (1, 2)), tf.ones([8, 1]), None))


def _measure_loss(model: Any, data: Any) -> Any:
    """Return how losses and states of parts add up, if each part has a loss."""
    model.optimizer.build(model.trainable_variables)
    with kept_attributes(model):
        spec = tf.nest.map_structure(open_rows, data)
        step = PlainSteps(model, "CPU:0").trace(spec, True)
        return measure(model, step, data, True, True)
