"""The result of each option of `compile` and `fit` in an engine, compared with plain Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from evener.keras import Split, make_logical_cpus
from tests.support.keras_program_losses import KINDS, VALUES, WEIGHTS, Made, X
from tests.support.keras_programs import Program
from tests.support.keras_proofs import make_plan
from tests.support.keras_twice import trace_faster, unaudited

ROWS = 17  # two batches and a row
HELD = (X[:ROWS], VALUES[:ROWS])


def compiled(loss: Any = "mse", two_outputs: bool = False, **words: Any) -> Made:
    """Return a model that is compiled with these options."""

    def make() -> Any:
        entry = keras.Input((6,), name="rows")
        found: Any = layers.Dense(1, name="first")(layers.Dense(5, activation="tanh")(entry))
        if two_outputs:
            found = {"first": found, "second": layers.Dense(1, name="second")(entry)}
        model = keras.Model({"rows": entry} if two_outputs else entry, found)
        model.compile(keras.optimizers.Adam(0.02), loss, **words)
        return model

    if two_outputs:
        return make, ({"rows": X}, {"first": VALUES, "second": -VALUES}, {})
    return make, (X, VALUES, {})


class StopsEarly(keras.callbacks.Callback):
    """Ends the training after its third batch."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Start counting again."""
        self.seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self.seen += 1
        self.model.stop_training = self.seen >= 3


def programs() -> dict[tuple[str, ...], Callable[[], Made]]:
    """Return programs by the names of the options that they use."""
    two_losses = {"first": "mse", "second": "mae"}
    return {
        ("loss_weights", "callbacks", "steps_per_epoch", "initial_epoch"): lambda: _with_fit(
            compiled(
                two_losses,
                True,
                loss_weights={"first": 0.3, "second": 2.0},
                metrics={"first": [], "second": ["mae"]},
            ),
            callbacks=[StopsEarly()],
            steps_per_epoch=2,
            initial_epoch=1,
            epochs=3,
        ),
        (
            "weighted_metrics",
            "sample_weight",
            "validation_data",
            "validation_steps",
            "validation_freq",
        ): lambda: _with_fit(
            compiled(weighted_metrics=["mae"]),
            sample_weight=WEIGHTS,
            validation_data=HELD,
            validation_batch_size=5,
            validation_steps=2,
            validation_freq=2,
        ),
        ("class_weight", "validation_split", "shuffle"): lambda: _with_labels(
            class_weight={0: 0.5, 1: 3.0, 2: 1.0},
            validation_split=0.4,
            shuffle=True,
            batch_size=ROWS,  # more than the rows that are left, so that their order doesn't matter
        ),
        ("run_eagerly",): lambda: compiled(run_eagerly=True),
        ("steps_per_execution", "jit_compile"): lambda: compiled(
            steps_per_execution=2, jit_compile=True
        ),
    }


def _with_fit(made: Made, **words: Any) -> Made:
    make, (x, y, _) = made
    return make, (x, y, words)


def _with_labels(**words: Any) -> Made:
    def make() -> Any:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])
        model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
        return model

    return make, (X, KINDS, words)


def run_options(_rank: int, engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the result of each option in each engine, with its messages.

    It is `exact`, `refused` or `differs`. Options that one program uses together share its result.
    Towers are audited.
    """
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    if "multiworker" not in engines:
        make_logical_cpus(2)
    splits = {
        engine: Split(make_plan(6, 2, micros=(2, 2) if engine == "passes" else None))
        for engine in engines
    }
    for engine in splits.keys() - {"towers"}:
        unaudited(splits[engine])
    trace_faster()
    found: dict[str, dict[str, Any]] = {engine: {} for engine in engines}
    for names, make in programs().items():
        program = Program(names[0], make(), ROWS, validated=False)
        for engine, split in splits.items():
            found[engine] |= dict.fromkeys(names, _judge(program.run(split)))
    return found


def _judge(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an option in one engine."""
    gap = answer.get("gap", 0.0)
    exact = answer["verdict"] == "trained" and np.nan_to_num(gap, nan=1.0) <= 1e-9
    verdict = "exact" if exact else answer["verdict"]
    return {"said": answer.get("said", ""), "gap": gap, "verdict": verdict}
