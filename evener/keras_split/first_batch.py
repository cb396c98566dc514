"""The first batch of a training or an evaluation: measured before its step, which then takes it as if nothing had been.

Nothing is drawn from the user's pipeline that the training doesn't train on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import keras
import msgspec
import tensorflow as tf

from ..errors import RequestError
from .compatibility import list_normalizations
from .dealt_arrays import DealtArrays
from .engines.keras_step import call_model, own_loss
from .measuring import MOST_ROWS, measure
from .nested_rows import OwnRows, Tensors, cut_rows, take_rows
from .part_kinds import PartKinds, refuse_everywhere, refuse_partial, refuse_replicas
from .traceless import traceless

PLAIN_SPECS = tf.TensorSpec | tf.SparseTensorSpec | tf.RaggedTensorSpec


def measure_first(engine: Any, device: str, training: bool, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keras' function of some steps, which measures the first batch it is given, and refuses what isn't exact."""
    measured = False

    def run_checked(batches: Any) -> Any:
        nonlocal measured
        if not measured:
            first, batches = peek(batches, engine.model.steps_per_execution)
            if first is not None:
                check_batch(engine, first, device, training)
            measured = True
        return run(batches)

    return run_checked


def peek(batches: Any, steps: int) -> tuple[Tensors, Any]:
    """The first batch, and an iterator that gives it again with what else was taken; None if there is none to read."""
    if not isinstance(batches, tf.data.Iterator):
        seen = list(islice(batches, steps))
        return (seen or [None])[0], seen
    if not all(isinstance(spec, PLAIN_SPECS) for spec in tf.nest.flatten(batches.element_spec)):
        return None, batches
    seen = list(islice(batches, steps))

    def repeat() -> Iterator[Any]:
        yield from seen

    with tf.device("CPU:0"):
        again = iter(tf.data.Dataset.from_generator(repeat, output_signature=batches.element_spec))
    return (seen or [None])[0], again


def check_batch(engine: Any, first: Tensors, device: str, training: bool = True) -> None:
    """Measure a batch, and tell the engine; RequestError for what it can't do exactly."""
    found, in_passes = _find(engine, first, device, training), training and engine.cut.in_passes
    engine.kinds[training] = found
    refuse_everywhere(found, engine.model)
    if _is_partial(engine, training):
        refuse_partial(found, engine.name, in_passes)


def check_replicas(engine: Any, first: Tensors) -> None:
    """Measure rows before replicas train, whose steps have no whole batch; RequestError for what isn't exact."""
    model = engine.model
    if engine.name != "mirrored" or model.train_function is not None or first is None:
        return
    triple = keras.utils.unpack_x_y_sample_weight(first)
    sparse = any(map(_is_not_dense, tf.nest.flatten(triple)))
    rows = None if sparse else MOST_ROWS  # a batch of a dataset; arrays, which may be large, are dense
    batch = tf.nest.map_structure(lambda each: None if each is None else _to_tensor(each, rows), triple)
    if not model.built:
        with model.distribute_strategy.scope():
            model(cut_rows(batch[0], 0, 1), training=False)
    found = measure(model, batch, training=True, partial=True)
    refuse_everywhere(found, model)
    _refuse_undefined(model, *batch)
    normal = [state for layer in list_normalizations(model, None) for state in layer.non_trainable_variables]
    refuse_replicas(found, model, [state.path for state in normal])


def _refuse_undefined(model: Any, x: Tensors, y: Tensors, weight: Any) -> None:
    """Refuse a loss that is no number for no rows, which a replica has in a short batch."""
    loss = 0.0
    with traceless(model), suppress(Exception):  # what fails says nothing here: the step will say it
        outputs = call_model(model, cut_rows(x, 0, 1), True)

        @tf.function  # type: ignore[untyped-decorator]  # where Keras knows of no rows before, it reduces them otherwise
        def compute(rows: Any) -> Any:
            own = [each if each is None else take_rows(each, rows) for each in (y, outputs, weight)]
            return own_loss(model, (), (x, *own), True)

        loss = float(compute(tf.constant(0))) if y is not None else 0.0
    if not math.isfinite(loss):
        raise RequestError(
            f"engine='mirrored' can't compute this loss for a device that has no rows of a short batch: it is {loss}.",
            "Give a number for each row, or use engine='towers'.",
        )


def _is_partial(engine: Any, training: bool) -> bool:
    """True if losses are computed of parts of a batch."""
    return bool(engine.name == "multiworker" or (training and engine.cut.in_passes))


def _find(engine: Any, first: Tensors, device: str, training: bool) -> PartKinds:
    """The model's measured properties; in a group, the process with most rows measures for all."""
    group, weights = getattr(engine, "group", None), engine.cut.weights
    chosen = weights.index(max(weights))
    text = b""
    if group is None or group.rank == chosen:
        data = first.data if isinstance(first, OwnRows | DealtArrays) else first
        triple = keras.utils.unpack_x_y_sample_weight(data)
        with tf.device(device):
            batch = tf.nest.map_structure(lambda each: None if each is None else _to_tensor(each), triple)
            whole = int(first.rows) if isinstance(first, OwnRows) else 0
            found = measure(engine.model, batch, training, _is_partial(engine, training), whole)
        text = msgspec.json.encode(found)
    return msgspec.json.decode(text if group is None else group.share_text(text, chosen), type=PartKinds)


def _to_tensor(each: Any, rows: int | None = None) -> Any:
    """A tensor of the first `rows`, or of all; tensors that aren't dense stay as they are."""
    if _is_not_dense(each):
        return each
    return tf.convert_to_tensor(each if rows is None else each[:rows])


def _is_not_dense(each: Any) -> bool:
    return isinstance(each, tf.SparseTensor | tf.RaggedTensor)
