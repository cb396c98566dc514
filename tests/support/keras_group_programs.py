"""What users do around `fit`, in a group of processes and in one process: metrics, callbacks, data.

Each case trains float64 models of one layer on 17 rows in batches of 8, shared 6 : 2, so the last
batch is one row.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from evener.errors import EvenerError
from evener.keras import Split, SplitWarning
from tests.support import launched_plan
from tests.support.keras_proofs import make_plan
from tests.support.keras_twice import (
    Scaled,
    difference,
    digest,
    seeded,
    set_seed,
    trace_faster,
    train_twice,
    unaudited,
    with_variables,
)

RANDOM = np.random.default_rng(5)
BATCH, ROWS = 8, 17
X = RANDOM.normal(size=(ROWS, 4))
Y = RANDOM.normal(size=(ROWS, 1))
LABELS = RANDOM.integers(0, 3, ROWS)
WEIGHTS = RANDOM.uniform(0.5, 2.0, ROWS)
LONG = np.repeat(Y[:, None], 9000, 1)

Model = Any
Figures = dict[str, Any]


class Largest(keras.metrics.Metric):
    """The largest error so far, a state that isn't a sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Update the maximum."""
        self.most.assign(ops.maximum(self.most, ops.max(ops.abs(y - outputs))))

    def result(self) -> Any:
        """Return the maximum."""
        return self.most


def deviation(y: Any, outputs: Any) -> Any:
    """Return a function of the whole batch."""
    return ops.std(y - outputs)


class OwnMetrics(keras.Sequential):
    """Metrics of x too, computed as in Keras' documentation."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the rows' largest input with the compiled metrics."""
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"input": ops.max(x)}


def regression() -> Model:
    """Return one layer from four numbers to one.

    Its metric is summed over rows by Keras, and its optimizer has states.
    """
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse", metrics=["mae"])
    return with_variables(model, X, Y)


def two_heads() -> Model:
    """Return a model with a loss and metrics for each output.

    The metrics are those of the whole batch, and a confusion matrix of three classes.
    """
    body = Kinds()(entry := keras.Input((4,)))
    kind = layers.Dense(3, activation="softmax", name="kind")(body)
    model = keras.Model(entry, {"size": layers.Dense(1, name="size")(body), "kind": kind})
    iou = keras.metrics.MeanIoU(3, name="iou", sparse_y_pred=False)
    model.compile(
        "sgd",
        {"size": "mse", "kind": "sparse_categorical_crossentropy"},
        metrics={"size": ["mae", deviation], "kind": [iou, "accuracy"]},
        weighted_metrics={"kind": ["accuracy"]},
    )
    return with_variables(model, X, {"size": Y, "kind": LABELS})


def wide() -> Model:
    """Return a model whose outputs are too large to be sent. A metric of the user's is a
    mean too.
    """
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1), layers.RepeatVector(9000)])
    model.compile(
        "sgd", "mse", metrics=["mae", keras.metrics.MeanMetricWrapper(squares, name="squares")]
    )
    return with_variables(model, X, LONG)


def squares(y: Any, outputs: Any) -> Any:
    """Return the square for each row."""
    return ops.mean((y - outputs) ** 2, axis=-1)


def fit(model: Model, x: Any = X, y: Any = Y, epochs: int = 2, **words: Any) -> Figures:
    """Train two epochs in order. One device gets arrays as a dataset, which is quicker
    to prepare.
    """
    words = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **words}
    if (
        not hasattr(model.fit, "hooks")
        and isinstance(x, np.ndarray)
        and "steps_per_epoch" not in words
    ):
        x, y = batches(x, y, words.pop("sample_weight", None)), None
        del words["batch_size"], words["shuffle"]
        if "validation_data" in words:
            words["validation_data"] = batches(*words["validation_data"])
    return dict(model.fit(x, y, epochs=epochs, **words).history)


def batches(*rows: Any) -> Any:
    """Return (x, y, weight) as a dataset of batches, without the parts that are None."""
    return tf.data.Dataset.from_tensor_slices(
        tuple(each for each in rows if each is not None)
    ).batch(BATCH)


class Notes(keras.callbacks.Callback):
    """Every batch's metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Store the batch's metrics."""
        self.seen.append({name: float(figure) for name, figure in (logs or {}).items()})


def batch_figures(model: Model) -> Figures:
    """Return the metrics of each batch, from fit and from the methods for single batches."""
    notes = Notes()
    fit(model, callbacks=[notes])
    single = [model.train_on_batch(X[:rows], Y[:rows]) for rows in (8, 2, 1)]
    return {"fit": notes.seen, "single": single, "test": model.test_on_batch(X[:3], Y[:3])}


def results_twice(model: Model) -> Figures:
    """Return the result of an epoch, read repeatedly."""
    model.reset_metrics()
    model.train_on_batch(X[:8], Y[:8])
    model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    return {
        str(turn): {k: float(v) for k, v in model.get_metrics_result().items()} for turn in range(3)
    }


def evaluate_alone(model: Model) -> Figures:
    """Return the result of evaluate before any training."""
    return {
        "arrays": model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True),
        "dataset": model.evaluate(
            tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH), verbose=0
        ),
        "one": model.test_on_batch(X[:5], Y[:5]),
        "outputs": model.predict(X, batch_size=BATCH, verbose=0).tolist(),
    }


class Batches(keras.utils.PyDataset):
    """The rows as a PyDataset."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return X[index * BATCH :][:BATCH], Y[index * BATCH :][:BATCH]


def unbuilt() -> Model:
    """Return a model whose weights are created with its first batch."""
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def validated(model: Model) -> Figures:
    """Return the metrics of validation in each epoch and of evaluation, with weights."""
    history = fit(
        model,
        sample_weight=WEIGHTS,
        validation_data=(X[:11], Y[:11], WEIGHTS[:11]),
        validation_freq=2,
    )
    return history | {
        "alone": model.evaluate(X, Y, sample_weight=WEIGHTS, batch_size=BATCH, verbose=0)
    }


def some_steps(model: Model) -> Figures:
    """Return the metrics of epochs with fewer and with more steps than the arrays have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            str(n): fit(model, steps_per_epoch=n, epochs=3)
            | {"steps": int(model.optimizer.iterations)}
            for n in (2, 4)
        }


class StopBelow(keras.callbacks.Callback):
    """Stops in the middle of an epoch, by a batch's metric."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop once two thirds of the first error are gone."""
        if logs["mae"] < 0.9 * self.__dict__.setdefault("first", logs["mae"]):
            self.model.stop_training = True


class StopInOne(keras.callbacks.Callback):
    """Stops by a condition that only one process sees, such as a clock."""

    def __init__(self, split: Any) -> None:
        super().__init__()
        self.here = split is None or split.group.rank == 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop after the second batch."""
        if self.here and batch == 1:
            self.model.stop_training = True


class StopInOneEpoch(StopInOne):
    """Stops at an epoch's end by a condition that only one process sees."""

    on_train_batch_end = keras.callbacks.Callback.on_train_batch_end

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop after the first epoch."""
        if self.here and epoch == 0:
            self.model.stop_training = True


def stops(callback: Callable[[Any], Any]) -> Callable[[Model], Figures]:
    """Return a training that a callback ends, and its number of batches."""

    def run(model: Model) -> Figures:
        split = model.fit.hooks if hasattr(model.fit, "hooks") else None
        history = fit(model, epochs=6, callbacks=[callback(split)])
        return history | {"steps": int(model.optimizer.iterations)}

    return run


def overflowing(model: Model) -> Figures:
    """Return the metrics of a loss that becomes NaN, and the number of steps until then."""
    y, before, weights = Y.copy(), int(model.optimizer.iterations), model.get_weights()
    y[12] = np.nan
    fit(model, X, y, epochs=3, callbacks=[keras.callbacks.TerminateOnNaN()])
    model.set_weights(weights)
    steps = int(model.optimizer.iterations) - before
    assert steps == 2
    return {"steps": steps}


def early(model: Model) -> Figures:
    """Return the metrics with EarlyStopping that restores the best weights: here, the largest
    error.
    """
    stop = keras.callbacks.EarlyStopping(
        "val_loss", patience=1, mode="max", restore_best_weights=True
    )
    return fit(model, epochs=9, validation_data=(X[:9], Y[:9]), callbacks=[stop])


class Watched(layers.Layer):
    """Counts its rows in its own metric."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        """Return the rows."""
        self.seen.update_state(x)
        return x


def watched() -> Model:
    """Return a model with metrics of its inputs, of the whole batch, and a maximum."""
    model = OwnMetrics([keras.Input((4,)), Watched(), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", deviation, Largest()])
    return with_variables(model, X, Y)


class Kinds(layers.Layer):
    """Has a weight of each kind that TensorFlow can't sum between processes."""

    def build(self, shape: Any) -> None:
        """Create weights like those of quantized and masked layers."""
        kinds = ("int8", "bool", "uint8", "uint32", "int16")
        self.own = [
            self.add_weight(shape=(4,), dtype=k, initializer="ones", trainable=False, name=k)
            for k in kinds
        ]

    def call(self, x: Any) -> Any:
        """Return a result that uses all the weights."""
        for weight in self.own:
            x = x * ops.cast(weight, x.dtype)
        return x


def ragged_rows() -> Any:
    """Return rows of one to four words."""
    lengths = 1 + np.arange(ROWS) % 4
    return tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum()) % 11, lengths)


def ragged_model() -> Model:
    """Return a model that averages words."""
    entry = keras.Input((None,), dtype="int32", ragged=True)
    words = layers.Embedding(11, 4)(entry)
    model = keras.Model(entry, layers.Dense(1)(ops.mean(words, axis=1)))
    model.compile("sgd", "mse")
    return with_variables(model, ragged_rows(), Y)


def frames(model: Model) -> Figures:
    """Return the metrics with pandas tables for training, validation and evaluation.

    One device gets arrays, and so do all devices without pandas.
    """
    pandas = (
        import_module("pandas") if find_spec("pandas") and hasattr(model.fit, "hooks") else None
    )
    x, y = (pandas.DataFrame(X), pandas.Series(Y[:, 0])) if pandas else (X, Y)
    found = fit(model, x, y, validation_data=(x[:5], y[:5]))
    return found | {"evaluated": model.evaluate(x, y, batch_size=BATCH, verbose=0)}


def held_out(model: Model) -> Figures:
    """Return the metrics with the last rows of the arrays for validation, with weights."""
    words: Any = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    weights = np.linspace(0.5, 2.0, len(X))
    return dict(model.fit(X, Y, sample_weight=weights, validation_split=0.3, **words).history)


def saved(model: Model) -> Figures:
    """Return the contents of three kinds of checkpoint and a backup, in a folder of this
    process.
    """
    folder = Path(os.environ["CASE_FOLDER"], "split" if hasattr(model.fit, "hooks") else "plain")
    kinds = keras.callbacks
    writers = [
        kinds.ModelCheckpoint(
            folder / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
        ),
        kinds.ModelCheckpoint(folder / "model-{epoch}.keras", save_freq=2),
        kinds.ModelCheckpoint(folder / "old.h5"),
        kinds.CSVLogger(folder / "log.csv"),
        kinds.BackupAndRestore(folder / "backup", delete_checkpoint=False),
    ]
    folder.mkdir(exist_ok=True)
    found = fit(model, epochs=3, callbacks=writers)
    model.save(folder / "end.keras")
    files = sorted(path.name for path in folder.rglob("[!.]*") if path.is_file())
    for name in ("model-1.keras", "model-3.keras", "old.h5", "end.keras"):
        found[name] = [
            weight.tolist()
            for weight in keras.models.load_model(folder / name, compile=False).get_weights()
        ]
    model.load_weights(folder / "best.weights.h5")
    return (
        found
        | {
            "best": float(writers[0].best),
            "lines": len((folder / "log.csv").read_text().splitlines()),
        }
        | {"files": dict.fromkeys(files, 1)}
    )


def fit_ragged(model: Model) -> Figures:
    """Return the metrics for ragged arrays; `fit_words` has batches of them."""
    return fit(model, ragged_rows(), Y)


class OfWords(keras.Model):
    """A mean of words, whose weights are created by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = layers.Embedding(11, 4), layers.Dense(1)

    def call(self, x: Any) -> Any:
        """Return the mean."""
        padded = x.to_tensor() if isinstance(x, tf.RaggedTensor) else x
        return self.out(ops.mean(self.words(padded), axis=1))


def of_words() -> Model:
    """Return the compiled model."""
    model = OfWords()
    model.compile("sgd", "mse")
    return model


def fit_words(model: Model) -> Figures:
    """Return the metrics for ragged batches of two words per row."""
    rows = tf.RaggedTensor.from_uniform_row_length(np.arange(2 * ROWS) % 11, 2)
    rows = tf.RaggedTensor.from_row_lengths(rows.flat_values, [2] * ROWS)
    data = tf.data.Dataset.from_tensor_slices((rows, Y)).batch(BATCH)
    return dict(model.fit(data, epochs=2, verbose=0).history)


def single_batches(model: Model) -> list[Any]:
    """Return the results of train_on_batch, which GANs and reinforcement learning call."""
    return [model.train_on_batch(X[:rows], Y[:rows]) for rows in (8, 8, 5, 1)]


def fit_wide(model: Model) -> Figures:
    """Return the metrics for nine thousand numbers per row."""
    return fit(model, y=LONG)


def in_turn(*runs: Callable[[Model], Any]) -> Callable[[Model], list[Any]]:
    """Return a function that runs one after another on the same model, which is traced once."""
    return lambda model: [run(model) for run in runs]


CASES: dict[str, tuple[Callable[[], Model], Callable[[Model], Any]]] = {
    "metrics of batches, maxima, x and a layer": (watched, validated),
    "losses of single outputs, confusion matrices, weights of small kinds": (
        two_heads,
        lambda model: fit(model, y={"size": Y, "kind": LABELS}, sample_weight=WEIGHTS),
    ),
    "large outputs": (wide, fit_wide),
    "evaluate alone, without weights": (
        unbuilt,
        lambda model: model.evaluate(Batches(), verbose=0),
    ),
    (
        "evaluate alone, stops, figures of batches, asked again, steps_per_epoch, pandas, "
        "checkpoints, no number"
    ): (
        regression,
        in_turn(
            evaluate_alone,
            stops(lambda _: StopBelow()),
            early,
            stops(StopInOne),
            stops(StopInOneEpoch),
            batch_figures,
            results_twice,
            some_steps,
            frames,
            held_out,
            saved,
            overflowing,
        ),
    ),
    "ragged rows": (ragged_model, fit_ragged),
    "ragged rows of a model that waits for them": (of_words, fit_words),
    "single batches, in passes": (regression, single_batches),
}


def make_split() -> Split:
    """Return a split of three rows of four, and one."""
    return unaudited(Split(devices=["CPU:0", "CPU:1"], ratios=[6, 2], global_batch=BATCH))


def prove(_: int, folder: str) -> dict[str, Any]:
    """Return the results of every case, in a process of a group."""
    warnings.simplefilter("ignore")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    trace_faster()
    tempfile.tempdir = folder
    split = make_split()
    found: dict[str, Any] = {}
    for name, (make, run) in CASES.items():
        os.environ["CASE_FOLDER"] = str(Path(folder, name))
        os.makedirs(os.environ["CASE_FOLDER"], exist_ok=True)
        passes = unaudited(Split(make_plan(6, 2, micros=(2, 2))))
        chosen = passes if "in passes" in name else split
        found[name] = train_twice(chosen, make, run, traced=make in (regression, two_heads))
    model = split.build(regression)
    return found | {
        "refused": refused(split, model),
        "half": half(split),
        "measured": [measured("towers"), measured("multiworker")],
        "left": [path.name for path in Path(folder).glob("__autograph*")],
    }


def measured(engine: str) -> list[str]:
    """Return the messages about a plan that was measured with an engine."""
    names = [f"cpu-{i}-of-2" for i in range(2)]
    plan = launched_plan.plan(names, framework="tensorflow", precision="float64", engine=engine)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Split(plan)
    return [str(each.message) for each in seen if each.category is SplitWarning]


def killed(rank: int, folder: str, moment: int) -> dict[str, Any]:
    """Train four epochs with a backup and a checkpoint.

    The first process is killed once it has renamed `moment` files: for an odd moment, before it
    renames the last of them; for 0, never.
    """
    warnings.simplefilter("ignore")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    left, replace = [moment], os.replace

    def rename(*paths: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
        replace(*paths)
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)

    if rank == 0:
        patch("os.replace", rename).start()
    trace_faster()
    split = make_split()
    model = seeded(lambda: split.build(regression))
    path = Path(folder, "model.keras")
    whole = not path.exists() or bool(keras.models.load_model(path).get_weights())
    keep = [
        keras.callbacks.ModelCheckpoint(path),
        keras.callbacks.BackupAndRestore(Path(folder, "backup")),
    ]
    epochs = len(fit(model, epochs=4, callbacks=keep).get("loss", ()))
    left_over = sorted(each.name for each in Path(folder).iterdir())
    found = {"learned": digest(model), "epochs": epochs, "whole": whole, "files": left_over}
    if rank:
        return found
    one = seeded(regression)
    fit(one, epochs=4)
    return found | {"apart": difference(one.get_weights(), model.get_weights())}


def refused(split: Split, model: Model) -> dict[str, str]:
    """Return the message of each process if they have unequal data."""
    rank = split.required_group.rank
    last = Y.copy()
    last[-1] += rank
    parts = tf.data.Dataset.from_tensor_slices((X, Y)).shard(2, rank).batch(BATCH)
    tried = {
        "arrays": lambda model: fit(model, y=Y + rank),
        "epochs": lambda model: fit(model, epochs=2 + rank),
        "validation": lambda model: fit(model, validation_data=(X, Y + rank)),
        "evaluation": lambda model: model.evaluate(X, Y + rank, verbose=0),
        "dataset": lambda model: model.fit(batches(X, Y + rank), verbose=0),
        "last row": lambda model: model.fit(batches(X, last), verbose=0),
        "shards": lambda model: model.fit(parts, verbose=0),
        "equal labels": lambda model: model.fit(batches(X[:: 1 - 2 * rank], Y * 0), verbose=0),
        "nothing": lambda model: model.fit(batches(X, Y), verbose=0),
    }
    found = {}
    for name, action in tried.items():
        try:
            found[name] = ""
            action(model)
        except EvenerError as error:
            found[name] = str(error)
    return found


def half_model() -> Model:
    """Return a model in mixed_float16 with a layer in mixed_bfloat16.

    At its loss scale, some sums of gradients overflow.
    """
    set_seed()
    dense = [layers.Dense(16, activation="relu", dtype="float32"), layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), Scaled(), Scaled(dtype="mixed_bfloat16"), *dense])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1e-3), 2.0**17, dynamic_growth_steps=4
    )
    model.compile(optimizer, "mse")
    return with_variables(model, X, Y)


class Scales(keras.callbacks.Callback):
    """The loss scale after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Store the loss scale."""
        self.seen.append(float(self.model.optimizer.dynamic_scale))


def half(split: Split) -> dict[str, Any]:
    """Return the loss scales of the split and of one device, and the difference of the final
    weights.

    The first process trains the one device.
    """
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 4)), 16 * random.normal(size=(64, 1))
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        models, found = [split.build(half_model)], []
        models += [half_model()] if split.required_group.rank == 0 else []
        for model in models:
            scales = Scales()
            model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[scales])
            found.append(scales.seen)
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
    weights = [model.get_weights() for model in models]
    return {"scales": found, "apart": difference(weights[0], weights[-1])}


class FailsLate(layers.Layer):
    """Can't be traced for training in the second process."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def call(self, x: Any, training: Any = None) -> Any:
        """Return the rows, unchanged."""
        if training and self.rank == 1:
            raise ValueError("a file is missing here")
        return x


def fail_in_one(rank: int) -> dict[str, str]:
    """Return what each process raises if the second one's step can't be traced and it stays alive.

    A timer ends a process that waits forever.
    """
    faulthandler.dump_traceback_later(400, exit=True)
    split = Split(make_plan(6, 2))
    stack = [keras.Input((4,)), FailsLate(rank), layers.Dense(1)]
    model = split.build(keras.Sequential(stack))
    model.compile("sgd", "mse")
    found = {}
    try:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    except Exception as error:
        found = {"kind": type(error).__name__, "said": str(error)}
    faulthandler.cancel_dump_traceback_later()
    return found
