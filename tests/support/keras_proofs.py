"""Trains small models on one device and on several, and finds their differences.

Engine `towers` uses logical CPU devices; `multiworker` is one process of a group, with TF_CONFIG
set. Everything is float64. Each process also runs the cases of keras_users.py for its engine. Run
as a script on GPUs, with "towers on gpus" or multiworker, it prints its results as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import msgspec
import numpy as np
import tensorflow as tf
from keras import layers, losses, optimizers

from evener.errors import EvenerError
from evener.keras import Report, Split, SplitWarning, make_logical_cpus
from evener.keras.group import check_options
from evener.keras.part_kinds import PartKinds
from evener.keras.passes import StepStates
from evener.live.reporter import read_trainings
from evener.plan.file import Plan, Share, Throughput, make_layout
from evener.shares import divisions
from tests.support import keras_length_proofs, keras_rebalance_proofs, keras_users, launched_plan
from tests.support.keras_twice import (
    Scaled,
    count_traces,
    set_seed,
    trace_faster,
    train_twice,
    unaudited,
    with_variables,
)

BATCH = 24
RANDOM = np.random.default_rng(7)
ROWS = 3 * BATCH + 9  # the last batch is short
ONE_OVER = 3 * BATCH + 1  # the last batch is a single row
X = RANDOM.normal(size=(ROWS, 8, 8, 1))
Y = RANDOM.integers(0, 5, ROWS)
WEIGHTS = RANDOM.uniform(0.5, 2.0, ROWS)
CLASSES = {0: 1.0, 1: 3.0, 2: 0.5, 3: 1, 4: 2}  # weight of each class
WORDS = np.where(
    np.arange(6) < RANDOM.integers(1, 7, (ROWS, 1)), RANDOM.integers(1, 11, (ROWS, 6)), 0
)

Make = Callable[[], Any]
REWRITTEN = (
    "clipped accumulation, adamw, L2, activity, weighted mean, three steps per execution 5:0:1",
)  # with towers, whose graphs TensorFlow rewrites


def make_plan(*batches: int, micros: tuple[int, ...] | None = None) -> Plan:
    """Return a plan for CPU slices with these shares, in passes of up to `micros` rows."""
    names = [Share(f"cpu-{i}-of-{len(batches)}", i, "a slice", 0, 0.0) for i in range(len(batches))]
    layout = make_layout(
        "split" if sum(map(bool, batches)) > 1 else "solo", tuple(names), batches, micros=micros
    )
    return launched_plan.make_plan(layout, framework="tensorflow", precision="float64")


def network(
    optimizer: Any,
    *,
    loss: Any = "sparse_categorical_crossentropy",
    extra: Any = (),
    pictures: bool = False,
    base: Any = keras.Sequential,
    **compiled: Any,
) -> Any:
    """Return two dense layers, after a convolution and pooling for `pictures`.

    `extra` layers precede the dense ones.
    """
    set_seed()
    regularizer = compiled.pop("regularizer", None)
    seen = [
        layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer),
        layers.MaxPooling2D(),
    ]
    activity = compiled.pop("activity", None)
    model = base(
        [
            keras.Input((8, 8, 1)),
            *(seen if pictures else ()),
            *extra,
            layers.Flatten(),
            layers.Dense(
                8, activation="tanh", kernel_regularizer=regularizer, activity_regularizer=activity
            ),
            layers.Dense(5, activation="softmax"),
        ]
    )
    model.compile(optimizer, loss, metrics=["accuracy"], **compiled)
    return model


def masked_network(optimizer: Any = None) -> Any:
    """Return a model for padded words whose mask reaches the loss.

    The embedding's gradient is sparse, with repeated rows.
    """
    set_seed()
    model = keras.Sequential(
        [keras.Input((6,)), layers.Embedding(11, 4, mask_zero=True), layers.Dense(1)]
    )
    model.compile(optimizer or optimizers.Adam(0.01), "mse")
    return model


def embedding_network() -> Any:
    """Return a model for words that often repeat in a batch: a sparse gradient with
    repeated rows.
    """
    set_seed()
    model = keras.Sequential(
        [keras.Input((6,)), layers.Embedding(11, 4), layers.Flatten(), layers.Dense(1)]
    )
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def two_headed_network() -> Any:
    """Return a model with named outputs, a loss and weight for each, and its own metrics."""
    set_seed()
    image = keras.Input((8, 8, 1), name="image")
    flat = layers.Flatten()(image)
    outputs = {
        "kind": layers.Dense(5, activation="softmax", name="kind")(flat),
        "size": layers.Dense(1, name="size")(flat),
    }
    model = keras.Model({"image": image}, outputs)
    model.compile(
        optimizers.SGD(0.05),
        {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


def compare(
    split: Split,
    make: Make,
    x: Any,
    y: Any,
    then: Callable[[Any], Any] = lambda _: [],
    **fitted: Any,
) -> dict[str, Any]:
    """Fit the same data twice, by Keras alone on one device and by the split.

    `then` returns values of each model. Keras alone has batches of a dataset, which are quicker to
    prepare than arrays, unless it weighs classes.
    """
    options = {"epochs": 2, "verbose": 0}
    arrays = {"batch_size": BATCH, "shuffle": False, **fitted, **options}
    held = (
        {"validation_data": batches(*fitted["validation_data"])}
        if "validation_data" in fitted
        else {}
    )

    def run(model: Any) -> Any:
        return model.fit(x, y, **arrays).history, then(model)

    def alone(model: Any) -> Any:
        return model.fit(
            batches(x, y, fitted.get("sample_weight")), **held, **options
        ).history, then(model)

    rival = run if "class_weight" in fitted else alone
    return train_twice(split, lambda: with_variables(make(), x, y), run, rival)


def batches(*rows: Any) -> Any:
    """Return (x, y, weight) as a dataset of batches, without the parts that are None."""
    return tf.data.Dataset.from_tensor_slices(
        tuple(each for each in rows if each is not None)
    ).batch(BATCH)


def splits(engine: str) -> dict[str, Split]:
    """Return 3:1, 5:2:1, and 5:0:1 from a plan that leaves the middle device out."""
    cpus = ["CPU:0", "CPU:1", "CPU:2"]
    return {
        "3:1": Split(devices=cpus[:2], ratios=[3, 1], global_batch=BATCH, engine=engine),
        "5:0:1": Split(make_plan(20, 0, 4), engine=engine),
        "5:2:1": Split(devices=cpus, ratios=[5, 2, 1], global_batch=BATCH, engine=engine),
    }


def rules() -> dict[str, Make]:
    """Return optimizers that every engine has to follow exactly."""
    return {
        "sgd": lambda: network(optimizers.SGD(0.1), pictures=True),
        "momentum": lambda: network(optimizers.SGD(0.05, momentum=0.9), pictures=True),
        "adam": lambda: network(optimizers.Adam(0.01), regularizer="l2"),
    }


def exact_cases(by: dict[str, Split]) -> dict[str, Callable[[], dict[str, float]]]:
    """Return what towers learn, with cases that only a loss on the whole batch gets right."""
    weighted = losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    three = by["5:2:1"]
    regularized = {"loss": weighted, "activity": keras.regularizers.L2(0.1), "regularizer": "l2"}
    clipped = lambda: network(  # noqa: E731
        optimizers.AdamW(
            0.01, weight_decay=0.1, global_clipnorm=0.1, gradient_accumulation_steps=2
        ),
        steps_per_execution=3,
        **regularized,
    )
    return {
        REWRITTEN[0]: lambda: compare(by["5:0:1"], clipped, X, Y, sample_weight=WEIGHTS),
        "masked embedding, dataset": lambda: from_dataset(three),
    }


def in_passes() -> dict[str, Any]:
    """Return what towers learn in passes, and their refusals and messages."""
    plans = {
        "2:5": make_plan(14, 10, 0, micros=(7, 2, 0)),
        "5": make_plan(24, 0, 0, micros=(5, 0, 0)),
    }
    by = {name: unaudited(Split(plan)) for name, plan in plans.items()}
    accumulated = lambda: network(  # noqa: E731
        optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
        regularizer="l2",
        activity=keras.regularizers.L2(0.1),
    )
    rows = slice(ONE_OVER)
    dropping = network("sgd", extra=[layers.Dropout(0.5)])
    starts = [StepStates(dropping, PartKinds()).starts(device) for device in range(3)]
    seeds = [
        value.numpy().tolist() for start in starts for state, value in start if "seed" in state.path
    ]
    two = by["2:5"]
    tried = {
        "mask": lambda: two.build(masked_network).fit(
            WORDS[:BATCH], WORDS[:BATCH, :, None], verbose=0
        ),
        "eager": fit_once(two, lambda: network("sgd", run_eagerly=True)),
        "synchronized": fit_once(two, synchronized),
    }
    return {
        "passes 2:5, weights, one row, evaluate and predict": compare(
            two, accumulated, X[rows], Y[rows], then=evaluated, sample_weight=WEIGHTS[rows]
        ),
        "engine of one in passes": by["5"].engine,
        "seeds": seeds,
        "refused in passes": {name: said(action) for name, action in tried.items()},
        "said of passes": said_before(
            two, lambda: network("sgd", extra=[layers.BatchNormalization()])
        ),
    }


def batch_normalization(split: Split) -> dict[str, float]:
    """Return the difference of the moving averages of one step from a hundredth of those of all
    rows.
    """
    model = split.build(lambda: network(optimizers.SGD(0.0), extra=[layers.BatchNormalization()]))
    traces, rows = count_traces(model), X[:BATCH]
    model.fit(rows, Y[:BATCH], batch_size=BATCH, verbose=0)
    (mean,), (variance,) = (
        model.layers[0].moving_mean.numpy(),
        model.layers[0].moving_variance.numpy(),
    )
    apart = {
        "mean": abs(float(mean) - 0.01 * rows.mean()),
        "variance": abs(float(variance) - 0.99 - 0.01 * rows.var()),
    }
    return {**apart, "traces": len(traces)}


def dropout(split: Split) -> dict[str, float]:
    """Two towers with the same rows draw different masks, and the next step draws others again."""
    make = lambda: network(optimizers.SGD(0.0), extra=[layers.Dropout(0.5)])  # noqa: E731
    model = split.build(make)
    seeds = [variable for variable in model.non_trainable_variables if "seed" in variable.path]
    before = [seed.numpy().copy() for seed in seeds]
    seen = [model.train_on_batch(X[:BATCH], Y[:BATCH])[0] for _ in range(2)]
    moved = all((seed.numpy() != old).any() for seed, old in zip(seeds, before, strict=True))
    return {
        "seeds": float(len(seeds)),
        "moved": float(moved),
        "apart": float(abs(seen[0] - seen[1])),
    }


def saved(model: Any, folder: str) -> dict[str, float]:
    """A model trained by a split is saved under its own class, and predicts the same
    when loaded.
    """
    path = os.path.join(folder, "model.keras")
    model.save(path)
    again = keras.models.load_model(path)
    drift = float(np.abs(again.predict(X, verbose=0) - model.predict(X, verbose=0)).max())
    return {"predict": drift, "plain": float(type(again) is keras.Sequential)}


def placed(split: Split) -> dict[str, list[str]]:
    """Return the devices on which the traced step has each kind of heavy operation."""
    model = split.build(rules()["sgd"])
    batch = (tf.TensorSpec([None, 8, 8, 1], tf.float64), tf.TensorSpec([None], tf.int64))
    traced = tf.function(model.train_step, autograph=False).get_concrete_function(batch)
    found: dict[str, set[str]] = {}
    for operation in traced.graph.get_operations():
        found.setdefault(operation.type, set()).add(operation.device.rpartition("device:")[2])
    kinds = ("Conv2D", "Conv2DBackpropFilter", "MaxPool", "MaxPoolGrad", "MatMul")
    return {kind: sorted(found[kind]) for kind in kinds}


def half_network() -> Any:
    """Return one layer that computes in half precision, and one that doesn't."""
    set_seed()
    last = layers.Dense(5, activation="softmax", dtype="float32")
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), Scaled(), last])
    model.compile(optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


def half(split: Split) -> dict[str, float]:
    """Return the results of mixed_float16: close to one device.

    An overflow on only the second device skips the step and halves the scale.
    """
    keras.config.set_dtype_policy("mixed_float16")
    try:
        one, many = half_network(), split.build(half_network)
    finally:
        keras.config.set_dtype_policy("float64")
    for model in (one, many):
        model.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    near = max(
        float(np.abs(a - b).max())
        for a, b in zip(one.get_weights(), many.get_weights(), strict=True)
    )
    before, scale = many.get_weights(), float(many.optimizer.dynamic_scale)
    spoilt = X[:BATCH].copy()
    spoilt[-1] = 1e30
    many.fit(spoilt, Y[:BATCH], verbose=0, shuffle=False)
    kept = max(float(np.abs(a - b).max()) for a, b in zip(before, many.get_weights(), strict=True))
    return {"near": near, "kept": kept, "scale": float(many.optimizer.dynamic_scale) / scale}


def from_dataset(split: Split) -> dict[str, Any]:
    """Return results with the user's own tf.data pipeline, with batches of any size.

    The last batch is a single row.
    """
    words, aims = WORDS[: 4 * 17 + 1], np.cos(WORDS[: 4 * 17 + 1])[..., None]
    data = tf.data.Dataset.from_tensor_slices((words, aims)).batch(17)
    make = lambda: with_variables(masked_network(), words, aims)  # noqa: E731
    return train_twice(split, make, lambda model: model.fit(data, epochs=2, verbose=0).history)


def own_reports() -> list[Any]:
    """Return what this process reports to the monitor."""
    return [training for training in read_trainings() if training.pid == os.getpid()]


def reported(split: Split, folder: str) -> dict[str, Any]:
    """Return what the monitor reads of a training that reports itself, during it and
    after its end.
    """
    seen: list[Any] = []

    class Watch(keras.callbacks.Callback):
        """Slow enough to be read twice."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.35)
            seen.extend(own_reports())

    os.environ["XDG_RUNTIME_DIR"] = folder
    model = split.build(dense)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[Report(split), Watch()])
    last = seen[-1]
    return {
        "devices": [[device.id, device.batch] for device in last.devices],
        "framework": last.framework,
        "rate": last.samples_per_second,
        "after": len(own_reports()),
    }


def ratios_form(folder: str) -> dict[str, Any]:
    """Return the results of gpus and ratios divided as in `multi_gpu_model`.

    It rounds down and gives the rest to the last. Classes have weights.
    """
    split = Split(devices=["CPU:0", "CPU:1"], ratios=[768, 560])
    files: dict[str, Any] = {}

    def save(model: Any) -> list[Any]:
        if hasattr(model.fit, "hooks"):
            files.update(saved(model, folder))
        return []

    rows = slice(ONE_OVER)
    found = compare(split, rules()["momentum"], X[rows], Y[rows], then=save, class_weight=CLASSES)
    return found | {"first": float(split.cut.sizes(100)[0]), "saved": files}


def said(action: Callable[[], Any]) -> str:
    """Return the class and message of the error that ends an attempt, or "" if it succeeds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except EvenerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fit_once(split: Split, make: Make, **fitted: Any) -> Callable[[], Any]:
    """Return an attempt to train a model by a split."""
    return lambda: split.build(make).fit(X[:BATCH], Y[:BATCH], verbose=0, **fitted)


class OwnStep(keras.Sequential):
    """A model with its own train step."""

    def train_step(self, data: Any) -> Any:
        """Run a step that no split could run."""
        return {"loss": self.compute_loss(y=data[1], y_pred=self(data[0]))}


def own_step() -> Any:
    """Return a compiled model with its own train step."""
    model = OwnStep(
        [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(5, activation="softmax")]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def dense() -> Any:
    """Return a compiled model of one layer, if the training doesn't matter."""
    model = uncompiled()
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
    return with_variables(model, X, Y)


def uncompiled() -> Any:
    """Return a model without a loss."""
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(5)])


class OwnLoss(keras.Sequential):
    """A model with its own compute_loss."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the compiled loss and the outputs' squares."""
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        return own + keras.ops.mean(y_pred**2)


def stateful() -> Any:
    """Return a recurrent layer whose rows continue in the next batch."""
    model = keras.Sequential(
        [keras.Input(batch_shape=(BATCH, 8, 8)), layers.SimpleRNN(5, stateful=True)]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


ALWAYS_TRIED = ("own step", "uncompiled", "small batch", "stateful")
TRIED = {
    "towers": (*ALWAYS_TRIED, "synchronized", "xla"),
    "multiworker": (*ALWAYS_TRIED, "generator"),
}


def refusals(split: Split) -> dict[str, str]:
    """Return the response to each attempt. Other tests cover attempts that an engine trains."""
    sgd = optimizers.SGD
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    normal = layers.BatchNormalization
    tried: dict[str, Callable[[], Any]] = {
        "own step": fit_once(split, own_step),
        "uncompiled": fit_once(split, uncompiled),
        "small batch": fit_once(split, dense, batch_size=1),
        "xla": fit_once(split, lambda: network(sgd(), jit_compile=True)),
        "synchronized": fit_once(split, lambda: network(sgd(), extra=[normal(synchronized=True)])),
        "stateful": fit_once(split, stateful),
        "generator": lambda: split.build(dense).fit(iter(data), verbose=0),
    }
    return {name: said(tried[name]) for name in TRIED[split.engine]}


def warned(split: Split) -> dict[str, Any]:
    """Return the messages before the first step of models with a difference, and whether XLA stays
    on.
    """
    compiled = split.build(lambda: network(optimizers.SGD(), jit_compile=True))
    compiled.make_train_function()
    found: dict[str, Any] = {"xla": compiled.jit_compile}
    for name, make in {
        "normalization": lambda: network(optimizers.SGD(), extra=[layers.BatchNormalization()]),
        "two heads": two_headed_network,
        "plain": rules()["adam"],
    }.items():
        found[name] = said_before(split, make)
    found["embedding"] = said_in_a_step(split, embedding_network)
    return found


def said_before(split: Split, make: Make) -> list[str]:
    """Return the messages before the first step of a model."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        split.build(make).make_train_function()
    return [str(each.message) for each in seen if each.category is SplitWarning]


def said_in_a_step(split: Split, make: Make) -> list[str]:
    """Return the messages as the first step on words is traced, which shows the
    gradients' kinds.
    """
    words = np.arange(144).reshape(24, 6) % 11
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        split.build(make).fit(words, np.zeros((24, 1)), batch_size=24, verbose=0)
    return [str(each.message) for each in seen if each.category is SplitWarning]


def requests() -> dict[str, str]:
    """Return the errors for impossible splits."""
    two = ["CPU:0", "CPU:1"]
    tried: dict[str, Callable[[], Any]] = {
        "no gpu": lambda: Split(gpus=[0, 1]),
        "gpus 0": lambda: Split(gpus=0),
        "ratio 0": lambda: Split(devices=two, ratios=[1, 0]),
        "ratio nan": lambda: Split(devices=two, ratios=[1, float("nan")]),
        "ratio below 0": lambda: Split(devices=two, ratios=[1, -2]),
        "ratios missing": lambda: Split(devices=two, ratios=[1]),
        "batch below devices": lambda: Split(devices=two, global_batch=1),
        "twice": lambda: Split(devices=["CPU:0", "CPU:0"]),
        "engine": lambda: Split(devices=two, engine="tower"),
        "nothing": lambda: Split(),
        "group missing": lambda: Split(devices=two, engine="multiworker"),
        "no file": lambda: Split("nowhere.toml"),
        "rebalance": lambda: Split(devices=two, rebalance=True),
        "noise": lambda: Split(devices=two, noise=True),
        "other precision, strict": lambda: Split(make_plan(4, 4), strict=True).build(
            lambda: half_precision()
        ),
        "by hand, strict": lambda: Split(by_hand(4, 4), strict=True).build(
            lambda: half_precision()
        ),
    }
    return {name: said(action) for name, action in tried.items()}


def by_hand(*batches: int) -> Plan:
    """Return a plan without measurements, and without a precision."""
    return msgspec.structs.replace(
        make_plan(*batches), throughput=Throughput(0.0, 0.0, 0.0), precision="float32"
    )


def half_precision() -> Any:
    """Return a model whose policy isn't the plan's."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return network(optimizers.SGD(0.1))
    finally:
        keras.config.set_dtype_policy("float64")


def main(engine: str, folder: str) -> dict[str, Any]:
    """Return every case of an engine by name."""
    warnings.simplefilter("ignore")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    # other tests cover graph rewriting; here it would take a third of the time
    if engine != "towers":
        trace_faster()
    if engine == "multiworker":
        return group_cases()
    if engine.endswith(" on gpus"):
        return gpu_cases()
    make_logical_cpus(3)
    by = splits(engine)
    cases: dict[str, Callable[[], Any]] = exact_cases(by)
    found: dict[str, Any] = {name: cases.pop(name)() for name in REWRITTEN}
    trace_faster()
    cases["half"] = lambda: half(by["3:1"])
    cases["batch normalization"] = lambda: batch_normalization(by["3:1"])
    found |= {name: case() for name, case in cases.items()}
    for split in by.values():
        unaudited(split)
    cases = {}
    cases["dropout"] = lambda: dropout(by["3:1"])
    cases["momentum, class weights, one row, ratios form"] = lambda: ratios_form(folder)
    cases["passes"] = in_passes
    cases["reported"] = lambda: reported(by["5:0:1"], folder)
    cases["placed"] = lambda: placed(by["5:2:1"])
    cases["epoch rows"] = lambda: epoch_rows(by["3:1"])
    cases["limits"] = limits
    cases["noted"] = lambda: noted(by["5:0:1"])
    cases["warned"] = lambda: warned(by["3:1"])
    cases["lengths"] = lambda: keras_length_proofs.main(
        by, Split(make_plan(14, 10, 0, micros=(7, 2, 0)))
    )
    cases["users"] = keras_users.towers
    cases["refusals"] = lambda: refusals(by["3:1"])
    cases["requests"] = requests
    found |= {name: case() for name, case in cases.items()}
    return found | found.pop("passes")


def gpu_cases() -> dict[str, Any]:
    """Return the cases of two real GPUs as towers: where the heavy work runs, and GPU 1 alone."""
    split, second = (
        Split(gpus=2, ratios=[3, 1], global_batch=BATCH),
        Split(gpus=[1], global_batch=BATCH),
    )
    make = rules()
    return {
        "adam L2": compare(split, make["adam"], X, Y, validation_data=(X[:40], Y[:40])),
        "momentum one row": compare(split, make["momentum"], X[:ONE_OVER], Y[:ONE_OVER]),
        "placed": placed(split),
        "second": compare(second, make["sgd"], X, Y),
        "engine of one": second.engine,
    }


def synchronized(**words: Any) -> Any:
    """Return a model with normalization over the whole batch and weight decay."""
    adamw = optimizers.AdamW(0.01, weight_decay=0.1)
    return network(
        adamw, regularizer="l2", extra=[layers.BatchNormalization(synchronized=True)], **words
    )


def evaluated(model: Any) -> list[Any]:
    """Return the results of evaluate with weights and of predict, with a short last batch."""
    if hasattr(model.fit, "hooks"):
        return [
            model.evaluate(X, Y, sample_weight=WEIGHTS, verbose=0),
            model.predict(X, verbose=0).tolist(),
        ]
    return [
        model.evaluate(batches(X, Y, WEIGHTS), verbose=0),
        model.predict(batches(X), verbose=0).tolist(),
    ]


def compare_dataset(split: Split) -> dict[str, Any]:
    """Compare whole batches of words from `split.data`, of which each process uses its rows.

    Their mask reaches the loss.
    """
    rows = WORDS, np.cos(WORDS)[..., None]
    make = lambda: with_variables(masked_network(optimizers.SGD(0.1)), *rows)  # noqa: E731
    fit = lambda model, data: model.fit(data, epochs=2, verbose=0).history  # noqa: E731
    return train_twice(
        split,
        make,
        lambda model: fit(model, split.data(*rows)),
        lambda model: fit(model, batches(*rows)),
    )


def limits() -> list[str]:
    """Return the messages about plans measured on slowed devices, or with one process per device.

    They are those of splits and of a training.
    """
    plan = make_plan(18, 0, 6)
    grouped = msgspec.structs.replace(
        plan, layout=msgspec.structs.replace(plan.layout, engine="multiworker")
    )
    shares = tuple(msgspec.structs.replace(share, limit="60%") for share in plan.layout.share)
    slowed = msgspec.structs.replace(
        plan, layout=msgspec.structs.replace(plan.layout, share=shares)
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        unaudited(Split(slowed)).build(dense).fit(X[:BATCH], Y[:BATCH], epochs=2, verbose=0)
        Split(grouped)
        Split(grouped, engine="towers")
    return [str(each.message) for each in seen if each.category is SplitWarning]


def noted(split: Split) -> list[str]:
    """Return the messages about the plan's batches, and then about others: arrays, and a dataset's
    own.
    """
    singles = tf.data.Dataset.from_tensor_slices((X, Y))
    first, second = split.build(dense), split.build(dense)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first.fit(X, Y, verbose=0)
        first.fit(singles, verbose=0)
        first.fit(X[:20], Y[:20], verbose=0)
        for _ in range(2):
            warnings.warn("turn", stacklevel=1)
            first.fit(X, Y, batch_size=20, verbose=0)
            second.fit(singles.batch(20).prefetch(1), verbose=0)
    return [
        str(each.message)
        for each in seen
        if each.category is SplitWarning or str(each.message) == "turn"
    ]


def epoch_rows(split: Split) -> dict[str, Any]:
    """Return the rows of two epochs of a shuffled dataset, twice."""
    rows = np.arange(ROWS)
    datasets = [split.data(rows, rows, shuffle=True, seed=5) for _ in range(2)]
    epochs = [
        [np.concatenate([x.numpy() for x, _ in data]).tolist() for _ in range(2)]
        for data in datasets
    ]
    sizes = [int(x.shape[0]) for x, _ in datasets[0]]
    complete = all(sorted(epoch) == rows.tolist() for each in epochs for epoch in each)
    return {
        "complete": complete,
        "repeatable": epochs[0] == epochs[1],
        "reshuffled": epochs[0][0] != epochs[0][1],
        "sizes": sizes,
    }


def sums(split: Split) -> dict[str, list[Any]]:
    """Return what a group sums, and the true sums, with their types.

    The data has two types, and lengths that vary.
    """
    group = split.required_group
    found: list[float] = []
    right: list[float] = []
    every = group.size * (group.size - 1) // 2  # the sum over ranks
    with mock.patch.object(group, "_all_reduce", wraps=group._all_reduce) as reduce:
        for turn in range(40):
            count = 1 + turn % 3
            own = [
                tf.fill([count], float(group.rank + turn)),
                tf.constant(group.rank * turn, tf.int32),
            ]
            floats, number = group.sum_now([*own, tf.fill([2, count], 1.0)])[:2]
            found += [*floats.numpy().tolist(), int(number)]
            right += [*[float(every + group.size * turn)] * count, every * turn]
    return {
        "found": found,
        "right": right,
        "kinds": sorted({each.args[0].dtype.name for each in reduce.mock_calls}),
    }


def group_cases() -> dict[str, Any]:
    """Return this process' part of a group of two or three. With three, it uses passes."""
    config = json.loads(os.environ["TF_CONFIG"])
    three = sum(map(len, config["cluster"].values())) == 3
    plan = make_plan(15, 6, 0, 3, micros=(3, 6, 0, 2)) if three else make_plan(18, 6)
    split = unaudited(Split(plan, rebalance=three))
    x, y, weights, held = X[:ONE_OVER], Y[:ONE_OVER], WEIGHTS[:ONE_OVER], (X[:40], Y[:40])
    if not three:
        divisions.WORTH_BYTES = 0  # the gradients of small models also in two sums
    found = {"sums": sums(split), "engine": split.engine}
    if three:
        adamw = lambda: network(  # noqa: E731
            optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1), regularizer="l2"
        )
        found["forced"] = keras_rebalance_proofs.forced(
            split, adamw, x, y, sample_weight=weights, validation_data=held
        )
        adam = lambda slow: network(optimizers.Adam(0.01), extra=[slow])  # noqa: E731
        found["by rule"] = keras_rebalance_proofs.by_rule(split, adam, X, Y)
        group = split.required_group
        return found | {
            "one that rebalances": said(
                lambda: check_options({"rebalance": group.rank == 1}, group)
            )
        }
    clipped = lambda: network(  # noqa: E731
        optimizers.SGD(0.01, momentum=0.9, global_clipnorm=0.1, gradient_accumulation_steps=2),
        loss=losses.SparseCategoricalCrossentropy(reduction="sum"),
        activity=keras.regularizers.L2(0.01),
        regularizer="l2",
    )
    classes = {0: 0.5, 1: 2.0, 3: 1.5}
    return found | {
        "sum clipped accumulation momentum L2 activity class weights one row": compare(
            split, clipped, x, y, validation_data=held, class_weight=classes
        ),
        "masked dataset": compare_dataset(split),
        "warned": warned(split),
        "adamw L2 synchronized own loss weights two rows": compare(
            split,
            lambda: synchronized(base=OwnLoss),
            X[: ONE_OVER + 1],
            Y[: ONE_OVER + 1],
            sample_weight=WEIGHTS[: ONE_OVER + 1],
        ),
        "refusals": refusals(split),
        "users": keras_users.group(),
    }


def prove(_rank: int, engine: str, folder: str) -> dict[str, Any]:
    """Run as one rank of `keras_ranks`."""
    return main(engine, folder)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
