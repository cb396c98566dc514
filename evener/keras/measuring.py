"""Measures what parts of a batch have in common with the whole: on the first batch, before its
step.

A few of its rows go through the model at once and in two unequal parts, outside the training's
graph. Then the step takes the batch as if nothing had been; nothing is drawn from the user's
pipeline that the training doesn't train on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf

from .attributes import CallTensors
from .compatibility import (
    OTHER,
    ROWS,
    SAME,
    SUM,
    PartKinds,
    list_normalizations,
    refuse_everywhere,
    refuse_partial,
    warn,
)
from .data import DealtArrays
from .engine import Engine
from .keras_step import OwnRows, Tensors, cut_rows
from .loss_kinds import CLOSE, first_line, judge_loss, kind_of
from .model_call import CallResult, ModelCall
from .passes import is_seed

MOST_ROWS = 8
OUTPUTS_DIFFER = {
    "float64": 1e-9,
    "float32": 1e-3,
}  # relative to the largest; other kernels add in another order
HALF_DIFFERS = 5e-2


def measure(model: Any, data: Tensors, training: bool, partial: bool, whole: int = 0) -> PartKinds:
    """Compare parts of the first rows, (x, y, weight), with all of them; `partial`: parts of a
    batch have own losses.

    What fails on the whole batch too says nothing here: the step will say it, and else there was a
    warning.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    batch = int(leaves[0].shape[0])
    if not model.built:
        build_model(model, data[0])
    if any(int(leaf.shape[0]) != batch for leaf in leaves):
        axes = ", ".join(str(int(leaf.shape[0])) for leaf in leaves)
        return PartKinds(
            fault=f"The first axes of a batch's arrays are {axes}: they have to be its rows."
        )
    if batch < 2:  # a second row, of other numbers
        data, batch = tf.nest.map_structure(_add_row, data), 2
    rows = min(batch, MOST_ROWS)
    try:
        call = ModelCall(model, data[0], training)
        result = call(cut_rows(data[0], 0, rows))
    except Exception as error:
        return _fault_of_rows(model, data[0], training, rows, whole, error)
    return _compare(call, cut_rows(data, 0, rows), rows, result, training, partial, whole)


def build_model(model: Any, x: Tensors) -> None:
    """Make the weights of a model that waits for its first batch: by one of these rows, or by all
    where it can't compute one alone, as of a graph whose rows are joined.
    """
    try:
        model(cut_rows(x, 0, 1), training=False)
    except (tf.errors.OpError, ValueError):
        model(x, training=False)


def _add_row(row: Any) -> Any:
    return None if row is None else tf.concat([row, row / 2 if row.dtype.is_floating else row], 0)


def _fault_of_rows(
    model: Any, x: Tensors, training: bool, rows: int, batch: int, error: Exception
) -> PartKinds:
    """The fault of a model that can't compute some rows alone."""
    own = int(keras.tree.flatten(x)[0].shape[0])
    try:
        if rows >= own:
            raise error
        ModelCall(model, x, training)(x)
    except Exception as fault:
        if own < batch and isinstance(
            fault, tf.errors.InvalidArgumentError
        ):  # as the shapes of a part don't fit
            return PartKinds(
                fault=(
                    f"{own} of a batch's {batch} rows can't be computed alone: {first_line(fault)}"
                )
            )
        warn(f"{model.name} couldn't be checked before its first step: {first_line(fault)}")
        return PartKinds()
    return PartKinds(fault=_say_alone(rows, own, error))


def _say_alone(rows: int, batch: int, error: Exception) -> str:
    return f"The model computes {batch} rows, but not {rows} of them alone: {first_line(error)}"


def _compare(
    call: ModelCall,
    data: Tensors,
    rows: int,
    whole: CallResult,
    training: bool,
    partial: bool,
    batch: int,
) -> PartKinds:
    """Compare two parts of these rows with the whole."""
    model = call.model
    x, edges = data[0], (0, max(1, 3 * rows // 8), rows)
    sizes = (edges[1], rows - edges[1])
    cut = [cut_rows(x, start, stop) for start, stop in pairwise(edges)]
    try:
        parts = [call(each) for each in cut]
    except Exception as error:
        return PartKinds(fault=_say_alone(sizes[0], rows, error))
    fault = _find_fault(whole.outputs, [part.outputs for part in parts], rows, sizes)
    if fault and training and _is_random(call, x, whole):
        return measure(model, data, False, partial, batch)
    fault = fault or _find_assigned(whole, parts)
    if fault:
        return PartKinds(fault=fault)
    added = _judge_added(call, (x, *cut), (whole, *parts), sizes)
    states = _judge_states(model, {}, whole, parts, sizes)
    if whole.states:  # a sum that decays looks like a sum while it is 0
        again = [call(each, whole.states) for each in (x, *cut)]
        later = _judge_states(model, whole.states, again[0], again[1:], sizes)
        states = {
            place: kind if later.get(place, kind) == kind else OTHER
            for place, kind in states.items()
        }
    loss, seen = ROWS, ""
    if partial:
        now = CallTensors(model)
        leave = [functools.partial(call.leave, each) for each in (whole, *parts)]
        try:
            loss, seen = judge_loss(model, data, whole, leave, edges, training, batch)
        finally:
            now.restore()
    attributes = _judge_attributes(whole, parts, sizes)
    return PartKinds(loss, tuple(added), states, attributes, seen)


def _judge_added(
    call: ModelCall,
    every: Sequence[Tensors],
    calls: Sequence[CallResult],
    sizes: tuple[int, ...],
) -> list[str]:
    """The way in which each loss that layers add does so, by calls on all rows and on the parts.

    One that is 0 says nothing yet: its factor may grow from 0 on, or no row is concerned so far. It
    is looked at again with other values of the variables, and other rows.
    """
    found = [(one, *each) for one, *each in zip(*(each.added for each in calls), strict=True)]
    for change in (_raise_zeros, _change_weights):
        if all(any(figures) for figures in found):
            break
        with suppress(Exception):  # values that the model can't compute with
            varied, rows = change(call.model, every)
            again = [call(each, varied=varied).added for each in rows]
            pairs = zip(found, zip(*again, strict=True), strict=True)
            found = [before if any(before) else after for before, after in pairs]
    return [kind_of(one, each, sizes) for one, *each in found]


LATE = 1_000_000  # a step in which all that grows by steps has grown


def _raise_zeros(model: Any, every: Sequence[Tensors]) -> tuple[list[Any], Sequence[Tensors]]:
    """Variables that are 0 as 1, and counters of steps as those of a late step."""
    varied = []
    for variable in [*model.non_trainable_variables, model.optimizer._iterations]:
        value = tf.convert_to_tensor(variable)
        if is_seed(variable) or value.dtype.is_bool:
            continue
        if value.dtype.is_floating:
            varied.append((variable, tf.where(value == 0, tf.ones_like(value), value)))
        elif value.shape.rank == 0:
            varied.append((variable, value + tf.cast(LATE, value.dtype)))
    return varied, every


def _change_weights(model: Any, every: Sequence[Tensors]) -> tuple[list[Any], Sequence[Tensors]]:
    """Other weights besides, and rows with the other sign."""
    varied, _ = _raise_zeros(model, every)
    for number, variable in enumerate(model.trainable_variables):
        value = tf.convert_to_tensor(variable)
        noise = tf.random.stateless_normal(value.shape, (number, 5), dtype=value.dtype)
        varied.append((variable, value + 0.5 * noise))
    return varied, [tf.nest.map_structure(_negated, each) for each in every]


def _negated(leaf: Any) -> Any:
    return -leaf if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating else leaf


def _judge_attributes(
    whole: CallResult, parts: list[CallResult], sizes: tuple[int, ...]
) -> dict[str, str]:
    """The way in which those of an attribute's numbers add up that aren't rows, such as a mean."""
    found = {}
    for name, value in whole.attributes.items():
        own = [part.attributes.get(name) for part in parts]
        if any(each is None or each.shape != value.shape for each in own):
            continue
        if value.dtype.is_floating:
            first, *others = (np.asarray(each, np.float64) for each in (value, *own))
            found[name] = _judge_state(np.zeros_like(first), first, others, sizes)
        else:
            found[name] = SAME
    return found


def _find_fault(whole: Tensors, parts: list[Tensors], rows: int, sizes: tuple[int, ...]) -> str:
    """The reason why outputs can't be put together from those of parts; "" if they can."""
    for one, *each in zip(keras.tree.flatten(whole), *map(keras.tree.flatten, parts), strict=True):
        if one.shape.rank == 0:
            return (
                "An output of the model is a single number, so it can't be put together from the "
                "devices' rows."
            )
        lengths = [int(tensor.shape[0]) for tensor in (one, *each)]
        if lengths != [rows, *sizes]:
            return (
                f"An output of the model has a first axis of {lengths[0]} for {rows} rows: it "
                f"isn't the rows."
            )
        joined = [tensor.shape[1:] for tensor in each]
        if any(shape != one.shape[1:] for shape in joined):
            shapes = (
                f"{tuple(one.shape)} for {rows} rows, but {tuple(each[0].shape)} for {sizes[0]} "
                f"of them"
            )
            return f"An output of the model has the shape {shapes}."
        if not _is_close(one, tf.concat(each, 0)):
            return "A row's output of the model depends on the other rows of its batch."
    return ""


def _find_assigned(whole: CallResult, parts: list[CallResult]) -> str:
    """The reason why a call's `tf.Variable`s can't be put together from those of parts."""
    for value, *own in zip(whole.variables, *(part.variables for part in parts), strict=True):
        near = CLOSE.get(value.dtype.name, 1e-3) if value.dtype.kind == "f" else 0.0
        if not all(np.allclose(value, each, rtol=near, atol=near) for each in own):
            return (
                "A call of the model assigns a tf.Variable by the rows that it is given. What parts"
                " of a batch make of a weight, by add_weight, would be measured."
            )
    return ""


def _is_close(one: Any, other: Any) -> bool:
    if not (one.dtype.is_floating or one.dtype.is_complex):
        return True  # of labels a tie may change one
    differ = OUTPUTS_DIFFER.get(one.dtype.real_dtype.name, HALF_DIFFERS)
    first, second = (
        np.asarray(each, np.complex128 if one.dtype.is_complex else np.float64)
        for each in (one, other)
    )
    return bool(
        np.allclose(
            first,
            second,
            rtol=0,
            atol=differ * np.nanmax(np.abs(first), initial=1e-30),
            equal_nan=True,
        )
    )


def _is_random(call: ModelCall, x: Tensors, whole: CallResult) -> bool:
    """True if the same rows have other outputs when they are called again."""
    again = call(x)
    pairs = zip(keras.tree.flatten(whole.outputs), keras.tree.flatten(again.outputs), strict=True)
    return not all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)


def _judge_states(
    model: Any,
    starts: dict[int, Any],
    whole: CallResult,
    parts: list[CallResult],
    sizes: tuple[int, ...],
) -> dict[int, str]:
    """The way in which the changes of each assigned state add up; those of BatchNormalization do by
    rows.
    """
    normal = {
        id(state) for layer in list_normalizations(model) for state in layer.non_trainable_variables
    }
    every = model.non_trainable_variables
    found = {place: ROWS for place, state in enumerate(every) if id(state) in normal}
    for place, value in whole.states.items():
        before = starts[place] if place in starts else tf.convert_to_tensor(every[place]).numpy()
        found[place] = _judge_state(
            before, value, [part.states.get(place, before) for part in parts], sizes
        )
    return found


def _judge_state(before: Any, whole: Any, parts: list[Any], sizes: tuple[int, ...]) -> str:
    if whole.dtype.kind not in "iuf":
        return SAME if all(np.array_equal(whole, part) for part in parts) else OTHER
    first = np.asarray(whole, np.float64)
    start, *each = (np.asarray(value, np.float64) for value in (before, *parts))
    scale = CLOSE.get(whole.dtype.name, 1e-3) * max(
        np.abs(value).max(initial=0.0) for value in (first, start, *each)
    )
    changes = [value - start for value in each]
    meant = {
        SAME: each[0],
        ROWS: start
        + sum(size * change for size, change in zip(sizes, changes, strict=True)) / sum(sizes),
        SUM: start + sum(changes),
    }
    kinds = (SAME, ROWS, SUM) if whole.dtype.kind == "f" else (SAME, SUM)
    fit = [kind for kind in kinds if np.allclose(first, meant[kind], rtol=0, atol=scale)]
    if SAME in fit and not np.allclose(each[0], each[1], rtol=0, atol=scale):
        fit.remove(SAME)
    return fit[0] if fit else OTHER


PLAIN_SPECS = tf.TensorSpec | tf.SparseTensorSpec | tf.RaggedTensorSpec


def measure_first(
    engine: Engine, training: bool, run: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Keras' function of some steps, which measures the first batch it is given, and refuses what
    isn't exact.
    """
    measured = False

    def run_checked(batches: Any) -> Any:
        nonlocal measured
        if not measured:
            first, batches = peek(batches, engine.model.steps_per_execution)
            if first is not None:
                check_batch(engine, first, training)
            measured = True
        return run(batches)

    return run_checked


def build_variables(model: Any, data: Tensors, training: bool = True) -> None:
    """Make the variables of optimizer, losses and metrics from a row of (x, y, weight); errors are
    left to the step.

    TensorFlow would trace a step twice that makes variables.
    """
    with suppress(Exception):
        if training and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        x, y = cut_rows(data[:2], 0, 1)
        parts = model._compile_loss, model._compile_metrics
        missing = [part for part in parts if part is not None and not part.built]
        if missing and y is not None:
            outputs = ModelCall(model, x, training)(x).outputs
            for part in missing:
                part.build(y, outputs)


def peek(batches: Any, steps: int) -> tuple[Tensors, Any]:
    """The first batch, and an iterator that gives it again with what else was taken; None if there
    is none to read.
    """
    if not isinstance(batches, tf.data.Iterator):
        seen = list(islice(batches, steps))
        return (seen or [None])[0], seen
    if not all(isinstance(spec, PLAIN_SPECS) for spec in tf.nest.flatten(batches.element_spec)):
        return None, batches
    seen = list(islice(batches, steps))

    with tf.device("CPU:0"):
        again = iter(_dataset_of(seen, batches.element_spec))
    return (seen or [None])[0], again


def _dataset_of(seen: list[Tensors], spec: Any) -> Any:
    """These batches as a dataset of this kind, by which the step is traced: axes that are open stay
    so.
    """

    def repeat() -> Iterator[Any]:
        yield from seen

    if seen and all(
        isinstance(each, tf.TensorSpec) and each.shape.rank is not None
        for each in tf.nest.flatten(spec)
    ):
        other = tf.nest.map_structure(_other_size, spec, seen[0])
        every = [tf.data.Dataset.from_tensors(each) for each in seen]
        joined = functools.reduce(
            lambda one, more: one.concatenate(more),
            every,
            tf.data.Dataset.from_tensors(other).take(0),
        )
        if joined.element_spec == spec:
            return joined  # without a function to trace
    return tf.data.Dataset.from_generator(repeat, output_signature=spec)


def _other_size(spec: Any, tensor: Any) -> Any:
    """A tensor without values whose open axes have another length than this one's."""
    sizes = zip(spec.shape, tensor.shape, strict=True)
    return tf.zeros([int(have == 0) if size is None else size for size, have in sizes], spec.dtype)


def check_batch(engine: Engine, first: Tensors, training: bool = True) -> None:
    """Measure a batch, tell the engine, and make variables; RequestError for what it can't do
    exactly.
    """
    found, in_passes = _find(engine, first, training), training and engine.cut.in_passes
    engine.kinds[training] = found
    refuse_everywhere(found, engine.model)
    if engine.judges_parts(training):
        refuse_partial(found, engine.name, in_passes)
    with tf.device(engine.device):
        build_variables(engine.model, _read_triple(first), training)


def _find(engine: Engine, first: Tensors, training: bool) -> PartKinds:
    """The model's measured properties; in a group, the process with most rows measures for all."""
    group, weights = engine.group, engine.cut.weights
    chosen = weights.index(max(weights))
    text = b""
    if group is None or group.rank == chosen:
        with tf.device(engine.device):
            batch = _read_triple(first)
            whole = int(first.rows) if isinstance(first, OwnRows) else 0
            found = measure(engine.model, batch, training, engine.judges_parts(training), whole)
        text = msgspec.json.encode(found)
    return msgspec.json.decode(
        text if group is None else group.share_text(text, chosen), type=PartKinds
    )


def _read_triple(first: Tensors) -> Tensors:
    """(x, y, weight) of a batch, as tensors."""
    data = first.data if isinstance(first, OwnRows | DealtArrays) else first
    triple = keras.utils.unpack_x_y_sample_weight(data)
    return tf.nest.map_structure(lambda each: None if each is None else _to_tensor(each), triple)


def _to_tensor(each: Any) -> Any:
    """A tensor; those that aren't dense stay as they are."""
    return (
        each if isinstance(each, tf.SparseTensor | tf.RaggedTensor) else tf.convert_to_tensor(each)
    )
