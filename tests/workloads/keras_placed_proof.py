"""Steps of keras_towers wherever its operations lie, compared with one device; a part of keras_steps.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf

from evener.workloads.keras_backend import models
from evener.workloads.keras_backend.models import build, reviews
from evener.workloads.keras_backend.models import towers as model
from evener.workloads.protocol import Place
from tests.support.keras_twice import with_variables

SIZES: dict[str, int] = {"vocabulary": 200, "words": 40, "embedding": 8, "filters": 4, "kernel": 3, "dense": 16}
SMALL: dict[str, Any] = {**SIZES, "learning_rate": 0.01}
TWO = ("CPU:0", "CPU:1")


def placed() -> dict[str, Any]:
    """The largest relative differences by placement, and the devices of the traced operations."""
    keras.utils.set_random_seed(1)
    answer: dict[str, Any] = {}
    for placement in ("towers", "alternate"):
        place = Place(TWO, placement=placement)
        workload: Any = build("keras_towers", place, SMALL)
        start = [np.array(weight) for weight in workload.model.get_weights()]
        answer[placement] = {"devices": devices_of(workload), "gradients": gradients(workload, start)}
        answer[placement]["weights"] = trained(workload, start)
    answer["dense"] = by_hand()
    answer["resnet50"] = count_parameters(models.resnet50)
    return answer


def count_parameters(make: Callable[[], Any]) -> int:
    """The parameters of a network, which get no values."""
    plain = patch.object(models, "_compiled", lambda network, *_, **__: network)
    with plain, keras.StatelessScope(initialize_variables=False):
        return int(make().count_params())


def gradients(workload: Any, start: list[Any]) -> float:
    """The largest difference of a gradient or of the prediction from those of one tape over the whole model."""
    x, y = reviews(12, SMALL["words"], SMALL["vocabulary"])
    found: list[Any] = []

    @tf.function(autograph=False)
    def step() -> Any:
        with patch.object(workload.model.optimizer, "apply_gradients", lambda pairs: found.extend(pairs)):
            loss = workload.model.train_step(((tf.constant(x[0]), tf.constant(x[1])), tf.constant(y)))["loss"]
        return loss, [tf.convert_to_tensor(gradient) for gradient, _ in found]

    loss, gradients = step()
    plain = model(**SMALL)
    plain.set_weights(start)
    with tf.GradientTape() as tape:
        expected_loss = plain.compute_loss(y=tf.constant(y), y_pred=plain([tf.constant(each) for each in x]))
    own = [variable.value for variable in plain.trainable_variables]
    expected = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(expected_loss, own)]
    return max(
        difference(one, other) for one, other in zip([loss, *gradients], [expected_loss, *expected], strict=True)
    )


def by_hand() -> float:
    """How far a step of the table's Adam is from Adam's formula on the summed gradient, every word many times."""
    x, y = reviews(64, SMALL["words"], SMALL["vocabulary"])
    network = with_variables(model(**SMALL), tuple(map(tf.constant, x)), y)
    table = network.trainable_variables[0].value
    before = np.array(table)
    with tf.GradientTape() as tape:
        loss = network.compute_loss(y=tf.constant(y), y_pred=network([tf.constant(each) for each in x]))
    gradient = np.array(tf.convert_to_tensor(tape.gradient(loss, table)), np.float64)
    network.train_on_batch(x, y)
    rate, epsilon = SMALL["learning_rate"], network.optimizer.epsilon
    moment, square = 0.1 * gradient, 0.001 * gradient**2
    step = rate * np.sqrt(1 - 0.999) / (1 - 0.9) * moment / (np.sqrt(square) + epsilon)
    return difference(np.array(table), before - step)


class Known:
    """Three batches that a test can see too, in the place of the workload's own rows."""

    def batches(self, split: Any, batch: int) -> Any:
        """The dataset that the workload steps through, over and over."""
        x, y = reviews(3 * batch, SMALL["words"], SMALL["vocabulary"])
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat()


def trained(workload: Any, start: list[Any]) -> float:
    """The largest difference of a weight after three steps of Adam through the workload itself, on its own batches."""
    known = Known()
    plain = with_variables(model(**SMALL), *next(iter(known.batches(None, 2))))
    plain.set_weights(start)
    workload.data = known
    workload.prepare([8, 8])
    for _ in range(3):
        workload.step()
    workload.synchronize()
    for x, y in known.batches(None, 16).take(3):
        plain.train_on_batch(list(x), y)
    after = workload.model.get_weights()
    assert all(difference(one, other) > 0 for one, other in zip(after, start, strict=True)), "every weight has learnt"
    return max(difference(one, other) for one, other in zip(after, plain.get_weights(), strict=True))


def devices_of(workload: Any) -> dict[str, list[str]]:
    """The devices of the traced forward operations by layer, and of the convolutions' and dense layers' gradients."""
    found: dict[str, set[str]] = {}
    x, y = (tf.nest.map_structure(tf.constant, each) for each in reviews(4, SMALL["words"], SMALL["vocabulary"]))
    step = tf.function(workload.model.train_step, autograph=False).get_concrete_function((x, y))
    for operation in step.graph.get_operations():
        layer = next((part for part in operation.name.split("/") if part.startswith(("user_", "item_"))), "")
        if operation.type in ("Conv2D", "MaxPool", "MatMul", "Conv2DBackpropFilter", "MaxPoolGrad"):
            key = layer if layer and "Grad" not in operation.type else operation.type
            found.setdefault(key, set()).add(operation.device.rpartition("/device:")[2])
    return {kind: sorted(devices) for kind, devices in sorted(found.items())}


def difference(one: Any, other: Any) -> float:
    """Relative to the largest value."""
    one, other = np.asarray(one), np.asarray(other)
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-30))
