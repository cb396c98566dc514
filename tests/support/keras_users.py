"""Models as users write them, on one device and on several, and the differences. A part of
keras_proofs.py.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from evener.errors import EvenerError
from evener.keras import Report, Split
from evener.keras.data import batch_rows
from tests.support.keras_twice import train_twice, unaudited, with_variables

BATCH = 24
RANDOM = np.random.default_rng(7)
ROWS = 2 * BATCH + 1  # the last batch is a single row
X = RANDOM.normal(size=(ROWS, 6))
X *= X > 0.5
Y = RANDOM.integers(0, 3, ROWS)

Model = Any


def network(*extra: Any, base: Any = keras.Sequential, **compiled: Any) -> Model:
    """Return two dense layers, with `extra` layers between them."""
    dense = layers.Dense(
        8,
        activation="tanh",
        activity_regularizer=keras.regularizers.L2(0.1),
        kernel_regularizer="l2",
    )
    model = base([keras.Input((6,)), dense, *extra, layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", **{"metrics": ["accuracy"], **compiled})
    return with_variables(model, X, Y)


class OwnLoss(keras.Sequential):
    """A compute_loss as in Keras' documentation.

    It has a tracker named loss, and uses the layers' losses in its own way.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the loss with a quarter of the layers' losses."""
        own = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred))
        loss = own + 0.25 * keras.ops.sum(self.losses)
        self.loss_tracker.update_state(loss)
        return loss

    @property
    def metrics(self) -> list[Any]:
        """Return only the tracker."""
        return [self.loss_tracker]


class OwnSteps(keras.Sequential):
    """A model with its own test and predict steps."""

    def test_step(self, data: Any) -> dict[str, Any]:
        """Return its own metric."""
        return {"mine": keras.ops.sum(self(data[0]))}

    def predict_step(self, data: Any) -> Any:
        """Return twice the outputs."""
        return 2 * super().predict_step(data)


class Own(OwnLoss, OwnSteps):
    """A model with its own loss, steps and metrics."""


class Graphs(keras.Model):
    """Means over the nodes of each graph of a batch, whose nodes are in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(2)

    def call(self, batch: Any) -> Any:
        """Return two numbers for each graph."""
        return self.out(tf.math.segment_mean(batch["nodes"], batch["graphs"]))


def graphs() -> Model:
    """Return the model over nodes of graphs."""
    model = Graphs()
    model.compile("sgd", "mse")
    return model


def batches_of_graphs() -> Any:
    """Return a dataset of batches of three graphs, which have five or seven nodes together."""

    def generate() -> Any:
        for nodes in (5, 7):
            yield (
                {"nodes": X[:nodes], "graphs": np.sort(np.arange(nodes) % 3)},
                X[:3, :2],
            )

    nodes = {
        "nodes": tf.TensorSpec((None, 6), tf.float64),
        "graphs": tf.TensorSpec((None,), tf.int64),
    }
    signature = nodes, tf.TensorSpec((3, 2), tf.float64)
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


class Largest(keras.metrics.Metric):
    """The largest value, which isn't a sum over devices."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, x: Any, sample_weight: Any = None) -> None:
        """Include these values."""
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(x)))

    def result(self) -> Any:
        """Return the largest value so far."""
        return self.value + 0.0


class Watched(layers.Layer):
    """Counts its rows in metrics, and its calls in an integer. In tests it adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.largest = keras.metrics.Mean(name="seen"), Largest()
        self.calls = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.noise = keras.random.SeedGenerator(1)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the rows."""
        self.seen.update_state(x)
        self.largest.update_state(x)
        self.calls.assign_add(1)
        return (
            x
            if training
            else x + keras.random.normal(keras.ops.shape(x), seed=self.noise, dtype=x.dtype)
        )


class Added(layers.Layer):
    """Adds its own loss."""

    def call(self, x: Any) -> Any:
        """Add mean squares."""
        self.add_loss(keras.ops.mean(x**2))
        return x


class WithoutTraining(keras.Model):
    """A call without `training`, which Keras then never passes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop = layers.Dense(3, activation="softmax"), layers.Dropout(0.5)

    def call(self, x: Any, **words: Any) -> Any:
        """Apply dropout that stays off."""
        return self.dense(self.drop(x, **words))


class Block(layers.Layer):
    """Normalization inside a user's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = layers.BatchNormalization(synchronized=True)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return normalized values."""
        return self.normal(x, training=training)


class Single(layers.Layer):
    """One number for all rows."""

    def call(self, x: Any) -> Any:
        """Return the mean of the rows."""
        return keras.ops.mean(x)

    def compute_output_shape(self, shape: Any) -> tuple[int, ...]:
        """Return no shape."""
        return ()


class Batches(keras.utils.PyDataset):
    """The rows as a PyDataset."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return X[index * BATCH :][:BATCH], Y[index * BATCH :][:BATCH]


def added() -> Model:
    """Return a model for sparse rows whose only loss is that of its layer."""
    model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(4), Added()])
    # on GPUs Keras would compile it, and XLA has no sparse rows; the gradient of the weights is
    # sparse, and Adam squares each slice of it
    model.compile("adam", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def without_training() -> Model:
    """Return the model of that name, with nothing to train."""
    model = WithoutTraining()
    model.trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def stateful() -> Model:
    """Return a recurrent layer whose rows continue in the next batch."""
    model = keras.Sequential(
        [keras.Input(batch_shape=(BATCH, 3, 2)), layers.SimpleRNN(4, stateful=True)]
    )
    model.compile("sgd", "mse")
    return model


def single() -> Model:
    """Return an output without rows."""
    entry = keras.Input((6,))
    model = keras.Model(
        entry, {"kind": layers.Dense(3, activation="softmax")(entry), "mean": Single()(entry)}
    )
    model.compile("sgd", {"kind": "sparse_categorical_crossentropy"})
    return model


def fit(x: Any = X, y: Any = Y, **words: Any) -> Callable[[Model], list[float]]:
    """Return a function that trains two epochs and evaluates."""

    def run(model: Model) -> list[float]:
        history = model.fit(x, y, epochs=2, shuffle=False, verbose=0, **words).history
        return [figure for name in sorted(history) for figure in history[name]]

    return run


def fit_two_outputs(model: Model) -> Any:
    """Train a model in which one of two outputs has a loss."""
    return model.fit(X, {"kind": Y}, verbose=0)


def sparse_batches(model: Model) -> list[float]:
    """Train on a dataset of sparse batches without labels."""
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X),)).batch(BATCH)
    return list(model.fit(data, epochs=2, verbose=0).history["loss"])


def watched(model: Model) -> list[float]:
    """Return the layer's metric over training and evaluation, and its count."""
    figures = fit(batch_size=BATCH)(model)
    model.reset_metrics()
    model.predict(X, batch_size=BATCH, verbose=0)
    layer = model.layers[1]
    return [
        *figures,
        *(
            float(each)
            for each in (layer.seen.result(), layer.largest.result(), layer.calls.numpy())
        ),
    ]


def predict(model: Model) -> list[float]:
    """Return all outputs."""
    return [float(figure) for figure in np.ravel(model.predict(X, batch_size=BATCH, verbose=0))]


def own_test(model: Model) -> list[float]:
    """Return the model's own metric for the last batch."""
    return [model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)["mine"]]


def steps(model: Model) -> list[float]:
    """Return the results of the methods for single batches, one of which has a single row."""
    figures = [float(np.sum(model.train_on_batch(X[:rows], Y[:rows]))) for rows in (BATCH, 2, 1)]
    return [
        *figures,
        float(np.sum(model.test_on_batch(X[:1], Y[:1]))),
        *np.ravel(model.predict_on_batch(X[:3])),
    ]


def samples() -> Any:
    """Return a tf.data pipeline of single samples."""
    return tf.data.Dataset.from_tensor_slices((X, Y))


def is_split(model: Model) -> bool:
    """Return whether fit is the split's."""
    return hasattr(model.fit, "hooks")


def fit_samples(model: Model) -> list[float]:
    """Train and validate on single samples, which one device needs as batches."""
    data = samples() if is_split(model) else samples().batch(BATCH)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
    return [*history["loss"], *history["val_loss"], *model.evaluate(data, verbose=0)]


def fit_other_batches(split: Split) -> Callable[[Model], list[float]]:
    """Train the same, and then on batches of another size, which the split makes whole again."""

    def run(model: Model) -> list[float]:
        figures = fit_samples(model)
        data = split.data(samples().batch(10)) if is_split(model) else samples().batch(BATCH)
        return [*figures, *model.fit(data, epochs=2, verbose=0).history["loss"]]

    return run


def every_way(model: Model) -> list[float]:
    """Train on arrays with a PyDataset for validation, on single samples, and on single batches."""
    return [
        *fit(batch_size=BATCH, validation_data=Batches())(model),
        *fit_samples(model),
        *steps(model),
    ]


def refused(split: Split, make: Callable[[], Model], run: Callable[[Model], Any]) -> str:
    """Return the message instead of training."""
    return said(lambda: run(split.build(make)))


def towers() -> dict[str, Any]:
    """Return the results of every model on two devices.

    Only sparse rows and metrics in layers are audited.
    """
    audited = Split(devices=["CPU:0", "CPU:1"], ratios=[3, 1], global_batch=BATCH)
    split = unaudited(Split(devices=["CPU:0", "CPU:1"], ratios=[3, 1], global_batch=BATCH))
    by_batch = fit(batch_size=np.int64(BATCH))
    noisy = split.build(lambda: network(Watched()))
    noise = [noisy.predict(X[:8], verbose=0) for _ in range(2)]
    data = samples()
    fresh = Split(devices=["CPU:0", "CPU:1"], global_batch=BATCH)
    plain = split.build(network)
    # x and y are equally long, like batches of numbers
    vectors = tf.data.Dataset.from_tensor_slices((X, X))
    return {
        "single samples, rebatched, instance": train_twice(
            split, network, fit_other_batches(split), instance=True
        ),
        "batch sizes": [
            [len(x) for x, _ in split.data(data)]
            for data in (samples(), samples().batch(10), vectors)
        ],
        "rows": [
            batch_rows(data.batch(20).prefetch(1)),
            batch_rows(data.batch(20, drop_remainder=True)),
        ],
        "signatures": str(inspect.signature(noisy.fit))
        == str(inspect.signature(keras.Sequential().fit)),
        "copies": copies(split),
        "documented": documented(split, plain),
        "own loss, test and predict": train_twice(
            split,
            lambda: network(base=Own),
            lambda model: [*by_batch(model), *own_test(model), *predict(model)],
        ),
        "watched": train_twice(audited, lambda: network(Watched()), watched),
        "without training, frozen": train_twice(split, without_training, fit(x=Batches(), y=None)),
        "added, sparse": train_twice(audited, added, sparse_batches),
        "fresh noise": float(np.abs(noise[0] - noise[1]).max()),
        "reported": reported(split, plain),
        "named": Split(
            devices=[
                *(device.name for device in tf.config.list_logical_devices("CPU")[:2]),
                "cpu:2",
            ]
        ).devices,
        "refusals": {
            "assigned": refused(
                split, lambda: network(layers.SpectralNormalization(layers.Dense(8))), by_batch
            ),
            "stateful": refused(
                split, stateful, lambda m: m.fit(X[:BATCH].reshape(-1, 3, 2), X[:BATCH, :4])
            ),
            "single": refused(split, single, fit_two_outputs),
            "inner": refused(split, lambda: network(Block()), by_batch),
            "numbers": refused(split, network, lambda _: split.data(X, list(Y))),
            "elsewhere": elsewhere(),
            "no model": refused(split, lambda: None, by_batch),
            "no function": refused(split, "model.keras", by_batch),  # type: ignore[arg-type]
            "one cpu": one_cpu(),
            "unclear": said(lambda: fresh.data(tf.data.Dataset.from_tensor_slices((X, X)))),
            "graphs": refused(audited, graphs, fit(x=batches_of_graphs(), y=None)),
            "own order": refused(split, network, lambda _: split.data(samples(), shuffle=True)),
            "no list": refused_split(devices="CPU:0"),
            "no devices": refused_split(devices=[]),
            "words": refused_split(devices=["CPU:0", "CPU:1"], ratios=["3", "1"]),
            "plan and ratios": refused_split(plan="plan.toml", ratios=[3, 1]),
        },
    }


def reports(
    split: Split, model: Model, x: Any, y: Any = None, **words: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Return the reports of each step of two shuffled epochs, and fit's own."""
    callback, calls = Report(split), []
    callback._reporter = Mock(
        report=lambda samples, **labels: calls.append({"samples": samples, **labels})
    )
    return calls, model.fit(x, y, epochs=2, verbose=0, callbacks=[callback], **words).history


def reported(split: Split, model: Model) -> dict[str, Any]:
    """Return the reports for another batch size, for a dataset, and for two steps per execution."""
    dataset = reports(split, model, samples())[0]
    arrays = reports(split, model, X, Y, batch_size=16)[0]
    two = split.build(network)
    two.steps_per_execution = 2
    pairs = reports(split, two, X, Y, batch_size=16)[0]
    return {
        "devices": arrays[0]["devices"],
        "samples": [call["samples"] for call in arrays],
        "dataset": [call["samples"] for call in dataset],
        "pairs": [call["samples"] for call in pairs],
    }


def warned(action: Callable[[], Any]) -> list[str]:
    """Return the warnings by the split and by Keras."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in seen if issubclass(each.category, UserWarning)]


def copies(split: Split) -> dict[str, list[str]]:
    """Return the messages when a split model is copied, and when it is saved."""
    model = split.build(network)
    entry = keras.Input((6,))
    functional = keras.Model(entry, layers.Dense(3)(entry))
    functional.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        return {
            "clone_model": warned(lambda: keras.models.clone_model(model)),
            "clone_model functional": warned(
                lambda: keras.models.clone_model(split.build(functional))
            ),
            "deepcopy": warned(lambda: copy.deepcopy(model)),
            "pickle": warned(lambda: pickle.dumps(model)),
            "save": warned(lambda: model.save(os.path.join(folder, "model.keras"))),
        }


def documented(split: Split, model: Model) -> list[str]:
    """Return the warnings if fit is called as in README and docs."""
    return warned(
        lambda: (model.fit(X, Y, verbose=0), model.fit(split.data(X, Y, shuffle=True), verbose=0))
    )


def one_cpu() -> str:
    """Return the message for two logical CPUs that the script hasn't created."""
    with patch(
        "tensorflow.config.list_logical_devices",
        return_value=tf.config.list_logical_devices("CPU")[:1],
    ):
        return refused_split(devices=["CPU:0", "CPU:1"])


def elsewhere() -> str:
    """Return the message if Keras runs on another framework."""
    with patch("keras.config.backend", return_value="jax"):
        return refused_split(devices=["CPU:0", "CPU:1"])


def refused_split(**request: Any) -> str:
    """Return the response to a request."""
    return said(lambda: Split(**request))


def said(action: Callable[[], Any]) -> str:
    """Return the refusal of an attempt."""
    try:
        action()
    except EvenerError as error:
        return str(error)
    return ""


def group() -> dict[str, Any]:
    """Return the results of one process of two."""
    split = unaudited(Split(devices=["CPU:0", "CPU:1"], ratios=[3, 1], global_batch=BATCH))
    calls, history = reports(split, split.build(network), X, Y)
    another = Split(devices=["CPU:0", "CPU:1"], ratios=[3, 1], global_batch=BATCH)
    return {
        "rank": split.required_group.rank,
        "one group": another.required_group is split.required_group,
        "reported": [call["samples"] for call in calls],
        "shuffled": history,
        "own predict": train_twice(split, lambda: network(base=OwnSteps), predict),
        "added, sparse": train_twice(split, added, sparse_batches),
        "assigned, validated, single samples and batches, instance": train_twice(
            split,
            lambda: network(layers.SpectralNormalization(layers.Dense(8))),
            every_way,
            instance=True,
        ),
        "refusals": {
            "own test": refused(
                split, lambda: network(base=OwnSteps), lambda m: m.evaluate(X, Y, verbose=0)
            ),
            "single": refused(split, single, fit_two_outputs),
        },
    }
