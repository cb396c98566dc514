"""Measures how parts of a batch relate to the whole, on the first batch before its step.

A few of its rows go through the model together and in two unequal parts, outside the training's
graph. Then the step trains on the batch as if nothing had happened; nothing is taken from the
user's pipeline that the training doesn't use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from ..errors import RequestError
from .attributes import CallTensors
from .audit_step import kept_attributes
from .compatibility import (
    OTHER,
    ROWS,
    SAME,
    SUM,
    PartKinds,
    list_normalizations,
    refuse_partial,
)
from .data import DealtArrays
from .engine import Engine
from .keras_step import OwnRows, Tensors, cut_rows
from .loss_kinds import CLOSE, judge_loss, kind_of
from .model_call import CallResult, ModelCall
from .passes import is_seed

MOST_ROWS = 8


def measure(
    model: Any, data: Tensors, training: bool, partial: bool, call: ModelCall | None, whole: int = 0
) -> PartKinds:
    """Compare parts of the first rows, (x, y, weight), with all of them.

    `call` comes from `make_call`. `partial`: parts of a batch have separate losses. `whole` is the
    number of rows of the batch, 0 if unknown. The default `PartKinds` are returned if the model
    can't compute some of the rows alone; an audit will report that.
    """
    batch = int(keras.tree.flatten(data)[0].shape[0])
    if batch < 2:  # add a second row with different numbers
        data, batch = tf.nest.map_structure(_add_row, data), 2
    rows = min(batch, MOST_ROWS)
    first = max(1, 3 * rows // 8)
    every = [cut_rows(data[0], *edge) for edge in ((0, rows), (0, first), (first, rows))]
    if call is None:
        return PartKinds()
    try:
        results = [call(each) for each in every]
    except Exception:  # whatever the user's program raises
        return PartKinds()
    calls = PartCalls(call, every, results, (first, rows - first))
    found = calls.judge(cut_rows(data, 0, rows), (0, first, rows), training, partial, whole)
    unknown = OTHER in (*found.added, *found.states.values())
    if unknown and training and calls.are_random():
        return measure(model, data, False, partial, make_call(model, data[0], False), whole)
    return found


def make_call(model: Any, x: Tensors, training: bool) -> ModelCall | None:
    """Return a call of the model on rows like x, after creating its weights.

    Return None if the model can't be called in this way.
    """
    if not model.built:
        build_model(model, x)
    try:
        return ModelCall(model, x, training)
    except Exception:  # whatever the user's program raises
        return None


def build_model(model: Any, x: Tensors) -> None:
    """Create the weights of a model that would create them from its first batch.

    The model is called on one row, or on all rows if it can't compute one alone, for example
    because the rows are the nodes of one graph.
    """
    try:
        model(cut_rows(x, 0, 1), training=False)
    except (tf.errors.OpError, ValueError):
        model(x, training=False)


def _add_row(row: Any) -> Any:
    return None if row is None else tf.concat([row, row / 2 if row.dtype.is_floating else row], 0)


class PartCalls(NamedTuple):
    """Calls of a model on some rows: first on all rows, then on parts of these sizes."""

    call: ModelCall
    every: list[Tensors]  # x of each call
    results: list[CallResult]
    sizes: tuple[int, ...]

    def judge(
        self, data: Tensors, edges: Sequence[int], training: bool, partial: bool, batch: int
    ) -> PartKinds:
        """Return how losses, states and attributes of the parts combine into the whole batch's."""
        model = self.call.model
        loss, seen = ROWS, ""
        added = _judge_added(self.call, self.every, self.results, self.sizes)
        states = self._find_states()
        if partial:
            now = CallTensors(model)
            leave = [functools.partial(self.call.leave, each) for each in self.results]
            try:
                loss, seen = judge_loss(model, data, self.results[0], leave, edges, training, batch)
            finally:
                now.restore()
        whole, *parts = self.results
        attributes = _judge_attributes(whole, parts, self.sizes)
        return PartKinds(loss, tuple(added), states, attributes, seen)

    def are_random(self) -> bool:
        """True if another call on the same rows gives different outputs."""
        first, again = self.results[0].outputs, self.call(self.every[0]).outputs
        pairs = zip(keras.tree.flatten(first), keras.tree.flatten(again), strict=True)
        return not all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)

    def _find_states(self) -> dict[int, str]:
        """Return the kinds of states, judged by calls from two different values of the states.

        The first calls start from the current values, the second ones from the values after this
        call: a sum that decays can't be distinguished from a plain sum while it is 0.
        """
        whole, *parts = self.results
        states = _judge_states(self.call.model, {}, whole, parts, self.sizes)
        if not whole.states:
            return states
        again, *later = [self.call(each, whole.states) for each in self.every]
        found = _judge_states(self.call.model, whole.states, again, later, self.sizes)
        return {
            place: kind if found.get(place, kind) == kind else OTHER
            for place, kind in states.items()
        }


def _judge_added(
    call: ModelCall,
    every: Sequence[Tensors],
    calls: Sequence[CallResult],
    sizes: tuple[int, ...],
) -> list[str]:
    """Return how each loss that layers add adds up, by calls on all rows and on the parts.

    A loss of 0 reveals nothing: its factor may start from 0, or it may not concern any of these
    rows. It is measured again with other values of the variables, and other rows.
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


LATE = 1_000_000  # a step so late that everything that grows with the steps has grown


def _raise_zeros(model: Any, every: Sequence[Tensors]) -> tuple[list[Any], Sequence[Tensors]]:
    """Return 1 for variables that are 0, and late-step values for counters; rows are unchanged."""
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
    """Return values like `_raise_zeros`, weights with added noise, and rows with reversed signs."""
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
    """Return how tensors in attributes that don't consist of rows add up, for example a mean."""
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


def _judge_states(
    model: Any,
    starts: dict[int, Any],
    whole: CallResult,
    parts: list[CallResult],
    sizes: tuple[int, ...],
) -> dict[int, str]:
    """Return how the change of each assigned state adds up, by the state's index.

    Changes of BatchNormalization's states are always weighted by rows.
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
    """Wrap Keras' function of some steps so that it measures the first batch it is given.

    Raises RequestError if the training wouldn't be exact.
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


def build_variables(
    model: Any, data: Tensors, call: ModelCall | None, training: bool = True
) -> None:
    """Create the variables of optimizer, losses and metrics from one row of (x, y, weight).

    TensorFlow would trace a step twice if it created variables. `call` comes from `make_call`;
    errors are left to the step.
    """
    with suppress(Exception):
        if training and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        x, y = cut_rows(data[:2], 0, 1)
        parts = model._compile_loss, model._compile_metrics
        missing = [part for part in parts if part is not None and not part.built]
        if missing and y is not None and call is not None:
            outputs = call(x).outputs
            for part in missing:
                part.build(y, outputs)


def peek(batches: Any, steps: int) -> tuple[Tensors, Any]:
    """Return the first batch, and an iterator that gives all batches including that one.

    The first batch is None if there is none, or if the iterator has elements that aren't tensors.
    Up to `steps` batches are read ahead.
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
    """Return these batches as a dataset with this element spec, in which open axes stay open.

    The step is traced by this spec.
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
    """Return an empty or zero tensor whose open axes differ in length from this tensor's."""
    sizes = zip(spec.shape, tensor.shape, strict=True)
    return tf.zeros([int(have == 0) if size is None else size for size, have in sizes], spec.dtype)


def check_batch(engine: Engine, first: Tensors, training: bool = True) -> None:
    """Measure a batch, store the result in the engine, and create variables.

    Raises RequestError if the batch's loss can't be computed from its parts' losses.
    """
    with tf.device(engine.device):
        batch = _read_triple(first)
        _check_rows(batch)
        call = make_call(engine.model, batch[0], training)
        whole = int(first.rows) if isinstance(first, OwnRows) else 0
        partial = engine.judges_parts(training)

        def find() -> PartKinds:
            with kept_attributes(engine.model):  # the other processes call nothing meanwhile
                return measure(engine.model, batch, training, partial, call, whole)

        found = engine.kinds[training] = _share(engine, find)
        if partial:
            refuse_partial(found, engine.name, training and engine.cut.in_passes)
        build_variables(engine.model, batch, call, training)


def _check_rows(batch: Tensors) -> None:
    """Raise RequestError if the first axes of a batch's arrays differ in length.

    Then they can't all be its rows.
    """
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    counts = [int(leaf.shape[0]) for leaf in leaves]
    if len(set(counts)) > 1:
        axes = ", ".join(map(str, counts))
        raise RequestError(
            f"The first axes of a batch's arrays are {axes}: they have to be its rows.",
            "Train it on one device.",
        )


def _share(engine: Engine, find: Callable[[], PartKinds]) -> PartKinds:
    """Return the result of `find`; in a group, the process with most rows finds it for all."""
    group, weights = engine.group, engine.cut.weights
    chosen = weights.index(max(weights))
    if group is None:
        return find()
    text = msgspec.json.encode(find()) if group.rank == chosen else b""
    return msgspec.json.decode(group.share_text(text, chosen), type=PartKinds)


def _read_triple(first: Tensors) -> Tensors:
    """Return (x, y, weight) of a batch, as tensors."""
    data = first.data if isinstance(first, OwnRows | DealtArrays) else first
    triple = keras.utils.unpack_x_y_sample_weight(data)
    return tf.nest.map_structure(lambda each: None if each is None else _to_tensor(each), triple)


def _to_tensor(each: Any) -> Any:
    """Return a tensor; tensors that aren't dense are returned unchanged."""
    return (
        each if isinstance(each, tf.SparseTensor | tf.RaggedTensor) else tf.convert_to_tensor(each)
    )
