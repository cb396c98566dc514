"""The first batch of a training or an evaluation: measured before its step, which then takes it as if nothing had been.

Nothing is drawn from the user's pipeline that the training doesn't train on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import keras
import msgspec
import tensorflow as tf

from evener.keras_split.dealt_arrays import DealtArrays
from evener.keras_split.measuring import measure
from evener.keras_split.nested_rows import OwnRows, Tensors
from evener.keras_split.part_kinds import PartKinds, refuse_everywhere, refuse_partial

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


def _to_tensor(each: Any) -> Any:
    return each if isinstance(each, tf.SparseTensor | tf.RaggedTensor) else tf.convert_to_tensor(each)
