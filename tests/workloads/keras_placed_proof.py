"""Compare steps of keras_towers under each placement with one device.

A part of keras_steps.py.
"""

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
from evener.workloads.protocol import WorkerSetup
from tests.support.keras_twice import with_variables

SIZES: dict[str, int] = {
    "vocabulary": 200,
    "words": 40,
    "embedding": 8,
    "filters": 4,
    "kernel": 3,
    "dense": 16,
}
SMALL: dict[str, Any] = {**SIZES, "learning_rate": 0.01}
TWO = ("CPU:0", "CPU:1")


def placed() -> dict[str, Any]:
    """Return the largest relative differences and the traced devices for each placement."""
    keras.utils.set_random_seed(1)
    plain = with_variables(model(**SMALL), *next(iter(Known().batches(None, 2))))
    start = [np.array(weight) for weight in plain.get_weights()]
    whole, after = whole_gradients(plain), trained_alone(plain)
    answer: dict[str, Any] = {}
    for placement in ("towers", "alternate"):
        workload: Any = build("keras_towers", WorkerSetup(TWO, placement=placement), SMALL)
        workload.model.set_weights(start)
        found, graph = gradients(workload)
        apart = max(difference(one, other) for one, other in zip(found, whole, strict=True))
        answer[placement] = {"devices": devices_of(graph), "gradients": apart}
        answer[placement]["weights"] = trained(workload, start, after)
    answer["dense"] = by_hand()
    answer["resnet50"] = count_parameters(models.resnet50)
    return answer


def count_parameters(make: Callable[[], Any]) -> int:
    """Return the number of parameters of a network, without initializing them."""
    plain = patch.object(models, "_compiled", lambda network, *_, **__: network)
    with plain, keras.StatelessScope(initialize_variables=False):
        return int(make().count_params())


def whole_gradients(plain: Any) -> list[Any]:
    """Return the loss and the gradients from one tape over the whole model."""
    x, y = (
        tf.nest.map_structure(tf.constant, each)
        for each in reviews(12, SMALL["words"], SMALL["vocabulary"])
    )
    with tf.GradientTape() as tape:
        loss = plain.compute_loss(y=y, y_pred=plain(list(x)))
    own = tape.gradient(loss, [variable.value for variable in plain.trainable_variables])
    return [loss, *map(tf.convert_to_tensor, own)]


def gradients(workload: Any) -> tuple[list[Any], Any]:
    """Return the loss and the gradients of the workload's step, and the step's graph."""
    x, y = (
        tf.nest.map_structure(tf.constant, each)
        for each in reviews(12, SMALL["words"], SMALL["vocabulary"])
    )

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        found: list[Any] = []
        with patch.object(
            workload.model.optimizer, "apply_gradients", lambda pairs: found.extend(pairs)
        ):
            loss = workload.model.train_step((x, y))["loss"]
        return [loss, *(tf.convert_to_tensor(gradient) for gradient, _ in found)]

    traced = step.get_concrete_function(x, y)
    return step(x, y), traced.graph


def by_hand() -> float:
    """Return the difference of the table's Adam step from Adam's formula.

    The formula is applied to the summed gradient; every word occurs many times.
    """
    x, y = reviews(64, SMALL["words"], SMALL["vocabulary"])
    network = with_variables(model(**SMALL), tuple(map(tf.constant, x)), y)
    table = network.trainable_variables[0].value
    before = np.array(table)
    with tf.GradientTape() as tape:
        loss = network.compute_loss(
            y=tf.constant(y), y_pred=network([tf.constant(each) for each in x])
        )
    gradient = np.array(tf.convert_to_tensor(tape.gradient(loss, table)), np.float64)
    network.train_on_batch(x, y)
    rate, epsilon = SMALL["learning_rate"], network.optimizer.epsilon
    moment, square = 0.1 * gradient, 0.001 * gradient**2
    step = rate * np.sqrt(1 - 0.999) / (1 - 0.9) * moment / (np.sqrt(square) + epsilon)
    return difference(np.array(table), before - step)


class Known:
    """Three known batches that replace the workload's own rows."""

    def batches(self, split: Any, batch: int) -> Any:
        """Return a dataset that repeats these batches."""
        x, y = reviews(3 * batch, SMALL["words"], SMALL["vocabulary"])
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat()


def trained_alone(plain: Any) -> list[Any]:
    """Return the weights after three Adam steps on one device."""
    for x, y in Known().batches(None, 16).take(3):
        plain.train_on_batch(list(x), y)
    return list(plain.get_weights())


def trained(workload: Any, start: list[Any], expected: list[Any]) -> float:
    """Return the largest difference of a weight after three Adam steps of the workload."""
    workload.data = Known()
    workload.prepare([8, 8])
    for _ in range(3):
        workload.step()
    workload.synchronize()
    after = workload.model.get_weights()
    assert all(difference(one, other) > 0 for one, other in zip(after, start, strict=True)), (
        "every weight has learnt"
    )
    return max(difference(one, other) for one, other in zip(after, expected, strict=True))


def devices_of(graph: Any) -> dict[str, list[str]]:
    """Return the devices of the traced operations.

    Forward operations are listed by layer, gradients of convolutions and dense layers by type.
    """
    found: dict[str, set[str]] = {}
    for operation in graph.get_operations():
        layer = next(
            (part for part in operation.name.split("/") if part.startswith(("user_", "item_"))), ""
        )
        if operation.type in ("Conv2D", "MaxPool", "MatMul", "Conv2DBackpropFilter", "MaxPoolGrad"):
            key = layer if layer and "Grad" not in operation.type else operation.type
            found.setdefault(key, set()).add(operation.device.rpartition("/device:")[2])
    return {kind: sorted(devices) for kind, devices in sorted(found.items())}


def difference(one: Any, other: Any) -> float:
    """Return the largest difference, relative to the largest value."""
    one, other = np.asarray(one), np.asarray(other)
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-30))
