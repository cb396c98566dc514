"""Measures how the results of a batch's parts have to be combined: as means or as sums.

A loss may be a mean over rows, a mean over tokens, or a sum. This property is called the loss's
kind (see `part_kinds.py`). An engine has to know the kinds to combine the losses, variables and
attributes that its devices compute.

Therefore, before the first step, Keras' own step computes a few rows, first together and then in
two unequal parts. It runs in a graph without side effects. Audits check whether the combination is
exact; this module doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from ..errors import RequestError
from ..training.part_values import SUM, find_fitting
from .attributes import CallTensors
from .audit_step import (
    PlainSteps,
    StepCall,
    StepResult,
    TracedStep,
    Values,
    kept_attributes,
    replace_zeros,
)
from .compatibility import NO_PASSES, list_normalization_states, plain_variables, warn
from .engine import Engine
from .equal_draws import kept_generators
from .first_batch import peek, read_triple
from .keras_step import (
    Tensors,
    build_model,
    call_once,
    compute_compiled_loss,
    count_rows,
    cut_rows,
    open_rows,
    split_losses,
    take_rows,
)
from .part_kinds import (
    COUNTS,
    OTHER,
    ROWS,
    SAME,
    PartKinds,
    count_units,
)
from .passes import is_seed

MOST_ROWS = 8
# Relative differences that equal values may have.
CLOSE = {"float64": 1e-10}  # for states and layers' losses
NEAR = 1e-3  # for states and layers' losses of other types
LOSS_CLOSE = {"float64": 1e-6}  # models of float64 often compute softmax and norms in float32
LOSS_NEAR = 1e-5
UNITS = {
    "steps": "the steps that a mask leaves",
    "labels": "labels that aren't ignored",
    "weights": "weights",
}


def wrap_with_measurement(
    engine: Engine, plain: PlainSteps, training: bool, audited: bool, run: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Wrap Keras' train or test function `run`, so that `measure_batch` runs before its first call.

    `training` and `audited` are arguments of `measure_batch`. Raises RequestError in the first call
    if the engine can't combine the losses of a batch's parts.
    """
    is_first = True

    def run_measured(batches: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            first, batches = peek(batches, engine.model.steps_per_execution)
            if first is not None:
                measure_batch(engine, plain, first, training, audited)
        return run(batches)

    return run_measured


def measure_batch(
    engine: Engine, plain: PlainSteps, first: Tensors, training: bool, audited: bool
) -> None:
    """Measure how results of a batch's parts have to be combined, and store it in the engine.

    `first` is the first batch. In a group, the process with the largest share measures for all, and
    every process has to call this. If `audited` is True, the other processes trace Keras' own step
    in the meantime, because their audits need it. Raises RequestError if the plan has passes, and
    the loss can't be weighted exactly in passes.
    """
    # audits of the other processes need Keras' own step, so they trace it meanwhile
    model, group = engine.model, engine.group
    with tf.device(engine.device), kept_attributes(model):
        data = read_triple(first)
        with suppress(Exception):  # the step itself will report the program's error
            build_model(model, data[0])
            build_variables(model, data, training)
        weights = engine.cut.weights
        chosen = weights.index(max(weights))
        found = PartKinds()
        measures = group is None or group.rank == chosen
        step = None
        if measures or audited:
            with suppress(Exception):
                step = plain.trace(tf.nest.map_structure(open_rows, data), training)
        if step is not None and measures:
            with suppress(Exception):
                found = measure(model, step, data, training, engine.has_loss_per_part(training))
            found = msgspec.structs.replace(found, merged=step.merged)
            _warn_of_joined_lookups(step.joined)
    if group is not None:
        text = msgspec.json.encode(found) if group.rank == chosen else b""
        found = msgspec.json.decode(group.share_text(text, chosen), type=PartKinds)
    engine.kinds[training] = found
    if training and engine.cut.in_passes and found.loss in COUNTS:
        raise RequestError(
            f"A plan with passes can't weight this loss exactly: it is a mean over"
            f" {UNITS[found.loss]}, not over rows.",
            NO_PASSES,
        )


def _warn_of_joined_lookups(names: Sequence[str]) -> None:
    """Warn about embedding tables that several sparse lookups read.

    Adam and other optimizers that square gradients would train them differently on several devices
    than on one, because the gradient has other slices. `names` are the tables; the warning names
    the first.
    """
    if names:
        warn(
            f"{names[0]} is read by several calls of tf.nn.embedding_lookup_sparse. An optimizer"
            f" that squares gradients, like Adam, learns something else from rows that several"
            f" devices read: read it in one call, or train it with SGD."
        )


def build_variables(model: Any, data: Tensors, training: bool = True) -> None:
    """Create the variables of the optimizer, the loss and the metrics, unless they exist."""
    # TensorFlow traces a step twice if the step creates variables
    if training and not model.optimizer.built and model.trainable_variables:
        model.optimizer.build(model.trainable_variables)
    x, y, _ = data
    parts = model._compile_loss, model._compile_metrics
    missing = [part for part in parts if part is not None and not part.built]
    if missing and y is not None:
        outputs = call_once(model, x)
        for part in missing:
            part.build(cut_rows(y, 0, 1), outputs)


def measure(
    model: Any, step: TracedStep, data: Tensors, training: bool, needs_loss: bool
) -> PartKinds:
    """Run a step on up to 8 rows and on two parts of them, and return how to combine such results.

    If `needs_loss` is False, the kind of the compiled loss isn't measured, because the engine
    computes this loss on whole batches.
    """
    if int(count_rows(data)) < 2:
        data = tf.nest.map_structure(_add_row, data)
    rows = min(int(count_rows(data)), MOST_ROWS)
    first = max(1, 3 * rows // 8)
    every = [cut_rows(data, *edge) for edge in ((0, rows), (0, first), (first, rows))]
    results = [step.run(each) for each in every]
    whole, *parts = [result.call for result in results]
    if whole is None or None in parts:
        return PartKinds()
    measured = Measured(model, step, every, results, (first, rows - first))
    return PartKinds(
        measured.find_loss(training) if needs_loss else ROWS,
        tuple(measured.find_added()),
        measured.find_states(),
        measured.find_attributes(),
        valued=tuple(measured.find_valued()),
    )


def _add_row(row: Any) -> Any:
    """Append a second row to a tensor with one row, because a single row can't be divided."""
    return None if row is None else tf.concat([row, row / 2 if row.dtype.is_floating else row], 0)


class Measured(NamedTuple):
    """Results of Keras' own step for a few rows: for all of them at once, and for two parts."""

    model: Any
    step: TracedStep
    every: list[Tensors]  # (x, y, weight) of each run
    results: list[StepResult]
    sizes: tuple[int, ...]  # rows of each part

    def find_added(self) -> list[str]:
        """Return how each loss that layers add is combined from the parts of a batch.

        An entry is "rows" for a mean over rows, "sum" for a sum, or "" for neither.
        """
        # A loss of 0 reveals nothing: its coefficient may start from 0, or it may not concern these
        # rows. It is measured again with nonzero variables, then with other weights and inputs.
        found = self._read_added(self.results)
        for vary in (self._replace_zeros, self._change_weights):
            if all(any(values) for values in found):
                break
            with suppress(Exception):  # the model can't compute with these values
                values, rows = vary()
                again = self._read_added([self.step.run(row, values) for row in rows])
                found = [
                    before if any(before) else after
                    for before, after in zip(found, again, strict=True)
                ]
        near = CLOSE.get(keras.config.floatx(), LOSS_NEAR)
        kinds = [find_fitting(one, each, {ROWS: self.sizes}, near) for one, *each in found]
        return [fitting[0] if fitting else OTHER for fitting in kinds]

    def _read_added(self, results: Sequence[StepResult]) -> list[tuple[float, ...]]:
        """Return the values of each loss that layers add: a tuple with one value for each run."""
        calls = [result.call for result in results if result.call is not None]
        added = [split_losses(self.model, call.losses)[0] for call in calls]
        values = [[float(tf.reduce_sum(loss)) for loss in losses] for losses in added]
        return list(zip(*values, strict=True))

    def _replace_zeros(self) -> tuple[Values, list[Tensors]]:
        """Return nonzero values for variables that are 0, and batches for running the step again.

        A variable that is 0 may hide a loss. The batches are those of the earlier runs, unchanged;
        each is (x, y, weight). The values are a dict, indexed by the variables' keys.
        """
        return replace_zeros(self.model, self.step)[0], self.every

    def _change_weights(self) -> tuple[Values, list[Tensors]]:
        """Return noisy values for the weights, and batches for running the step again.

        They are used if a loss was 0 in all runs so far. The batches are those of the first runs,
        with negated inputs; each is (x, y, weight). The values are a dict, indexed by the
        variables' keys, and include those from `_replace_zeros`.
        """
        values, _ = self._replace_zeros()
        for number, variable in enumerate(self.model.trainable_variables):
            value = tf.convert_to_tensor(variable)
            noise = tf.random.stateless_normal(value.shape, (number, 5), dtype=value.dtype)
            values[id(variable.value.handle)] = value + 0.5 * noise
        return values, [(tf.nest.map_structure(_negate, x), *others) for x, *others in self.every]

    def find_states(self) -> dict[int, str]:
        """Return the rules for combining the values of non-trainable variables, by index.

        A rule says how a variable's values from the parts of a batch are combined.
        """
        # a sum that decays looks like a plain sum while it is 0
        variables = self.model.non_trainable_variables
        keys = {
            place: id(variable.value.handle)
            for place, variable in enumerate(variables)
            if not is_seed(variable) and id(variable.value.handle) in self.step.assigned
        }
        starts = {key: tf.convert_to_tensor(variables[place]) for place, key in keys.items()}
        once = self._find_state_rules(keys, starts, self.results)
        if keys:
            later = {key: self.results[0].states[key] for key in keys.values()}
            again = [self.step.run(each, later) for each in self.every]
            twice = self._find_state_rules(keys, later, again)
            once = {place: kind if twice[place] == kind else OTHER for place, kind in once.items()}
        averages = set(map(id, list_normalization_states(self.model)))
        return once | {
            place: ROWS for place, variable in enumerate(variables) if id(variable) in averages
        }

    def _find_state_rules(
        self, keys: Mapping[int, int], starts: Values, results: Sequence[StepResult]
    ) -> dict[int, str]:
        found = {}
        for place, key in keys.items():
            whole, *parts = (np.asarray(result.states[key]) for result in results)
            found[place] = _find_state_rule(np.asarray(starts[key]), whole, parts, self.sizes)
        return found

    def find_attributes(self) -> dict[str, str]:
        """Return how to combine the tensors that the model's call stores in attributes.

        The dict has a rule for each tensor, indexed by the tensor's name. The rule says how to
        combine the values that the parts of a batch give. A tensor is left out if its shape depends
        on the number of rows.
        """
        whole, *parts = [
            result.call.attributes for result in self.results if result.call is not None
        ]
        found = {}
        for name, value in whole.items():
            own = [part.get(name) for part in parts]
            if any(each is None or each.shape != value.shape for each in own):
                continue
            found[name] = SAME
            if value.dtype.is_floating:
                first, *others = (np.asarray(each, np.float64) for each in (value, *own))
                found[name] = _find_state_rule(np.zeros_like(first), first, others, self.sizes)
        return found

    def find_valued(self) -> list[int]:
        """Return the indices of the outputs whose loss has a value for each row."""
        # the metric that tracks such a loss counts rows; of a mean, it counts one value for a batch
        losses = self.model._compile_loss.metrics if self.model._compile_loss else []
        found = []
        for place, metric in enumerate(losses):
            key = id(metric.count.value.handle)
            if all(key in result.states for result in self.results):
                whole, *parts = [float(result.states[key]) for result in self.results]
                if whole == sum(parts):
                    found.append(place)
        return found

    def find_loss(self, training: bool) -> str:
        """Return what the compiled loss is a mean over, such as "rows".

        The result is "sum" for a sum, and "" if unknown.
        """
        # The rows may not distinguish all kinds: labels without padding don't show whether padding
        # counts. So the loss is also computed with changed masks, weights and labels.
        calls = [result.call for result in self.results if result.call is not None]
        now = CallTensors(self.model)
        left: list[str] = []
        try:
            for number, batch in enumerate(_list_variants(self.model, self.every[0], calls[0])):
                fitting = self._find_possible_loss_kinds(batch, calls, training)
                if fitting is None:
                    continue
                left = [kind for kind in fitting if not number or kind in left] or left
        finally:
            now.restore()
        return next((kind for kind in (*COUNTS, ROWS, SUM) if kind in left), OTHER)

    def _find_possible_loss_kinds(
        self, batch: Sequence[Tensors], calls: Sequence[StepCall], training: bool
    ) -> list[str] | None:
        """Return the kinds, such as "sum", that could explain how the parts' losses combine.

        A kind is possible if it gives the loss of all rows. `batch` is (x, y, outputs, weight), and
        `calls` are the model's calls on all rows and on each part. The result is None if the loss
        isn't finite, or if the user's loss raises an error.
        """
        values: list[float] = []
        counts: list[dict[str, float]] = []
        edges = (0, *np.cumsum(self.sizes).tolist())
        ranges = [(0, edges[-1]), *pairwise(edges)]
        for (start, stop), call in zip(ranges, calls, strict=True):
            self.step.store_attributes(call)
            try:
                own = [_cut_with_masks(each, start, stop) for each in batch]
                with _without_side_effects(self.model):
                    loss = compute_compiled_loss(self.model, calls[0].losses, own, training)
                    loss = tf.reduce_sum(loss)  # Keras learns from the sum of several values
            except Exception:  # any error of the user's program
                return None
            values.append(float(loss))
            units = count_units(self.model, *own[1:])
            counts.append({ROWS: stop - start} | {name: float(n) for name, n in units.items()})
        if not np.isfinite(values[0]):
            return None
        by_name = {name: tuple(count[name] for count in counts[1:]) for name in counts[0]}
        near = LOSS_CLOSE.get(loss.dtype.name, LOSS_NEAR)
        return find_fitting(values[0], values[1:], by_name, near)


def _find_state_rule(start: Any, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> str:
    """Return the rule by which a variable's values after two parts give its value after all rows.

    `start` is the value before the step. `whole` is the value after a step on all rows, and `parts`
    are the values after a step on each part, with `sizes` rows. The result is "" if no rule fits.
    """
    if whole.dtype.kind not in "iuf":
        return SAME if all(np.array_equal(whole, part) for part in parts) else OTHER
    values = [np.asarray(each, np.float64) for each in (start, whole, *parts)]
    largest = max(np.abs(value).max(initial=0.0) for value in values)
    near = CLOSE.get(whole.dtype.name, NEAR) * largest
    before, after, *others = values
    meant = _predict_whole_state(before, others, sizes, near)
    if whole.dtype.kind != "f":
        del meant[ROWS]
    fitting = [kind for kind, each in meant.items() if np.allclose(after, each, rtol=0, atol=near)]
    return fitting[0] if fitting else OTHER


def _predict_whole_state(
    before: Any, parts: Sequence[Any], sizes: Sequence[int], near: float
) -> dict[str, Any]:
    """Predict a variable's value after the whole batch, under each rule for combining the parts.

    `before` is the value before the batch, and `parts` are the values after each part, with `sizes`
    rows. Values that differ by at most `near` count as equal. Returns a dict from the name of the
    rule to the predicted value.
    """
    changes = [part - before for part in parts]
    weighted = [size * change for size, change in zip(sizes, changes, strict=True)]
    predictions = {ROWS: before + sum(weighted) / sum(sizes), SUM: before + sum(changes)}
    # the state is SAME in all parts
    if all(np.allclose(part, parts[0], rtol=0, atol=near) for part in parts):
        predictions = {SAME: parts[0]} | predictions
    return predictions


@contextmanager
def _without_side_effects(model: Any) -> Iterator[None]:
    """Context manager that restores a model's variables, random generators and added losses."""
    values = [(variable, variable.numpy()) for variable in plain_variables(model)]
    # regularizers that run in a scope see only the scope's weights
    given = [
        (weight, tf.convert_to_tensor(weight))
        for weight in model.trainable_weights
        if weight.regularizer is not None
    ]
    try:
        with kept_generators(), keras.StatelessScope(state_mapping=given, collect_losses=True):
            yield
    finally:
        for variable, value in values:
            variable.assign(value)
        model._clear_losses()


def _cut_with_masks(data: Tensors, start: int, stop: int) -> Tensors:
    """Return rows `start` to `stop` of the tensors, with Keras' masks."""
    cut = cut_rows(data, start, stop)
    for leaf, part in zip(keras.tree.flatten(data), keras.tree.flatten(cut), strict=True):
        mask = getattr(leaf, "_keras_mask", None)
        if mask is not None:
            part._keras_mask = mask[start:stop]
    return cut


def _negate(leaf: Any) -> Any:
    return -leaf if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating else leaf


# ------------------------------------------------------------------ rows that tell kinds apart


def _list_variants(model: Any, rows: Tensors, call: StepCall) -> Iterator[tuple[Any, ...]]:
    """Yield the batch, and then copies of it with other masks, weights or ignored labels.

    In a copy, means over rows and means over other units have different values. Each item is (x, y,
    outputs, weight). `call` is the model's call on `rows`.
    """
    x, y, weight = rows
    outputs = call.outputs
    yield x, y, outputs, weight
    if any(getattr(leaf, "_keras_mask", None) is not None for leaf in keras.tree.flatten(outputs)):
        yield x, y, _change_masks(outputs), weight
    if tf.is_tensor(weight):
        yield x, y, outputs, weight * tf.cast(_grow_by_row(weight), weight.dtype)
    ignored = getattr(model.loss, "ignore_class", None)
    if ignored is not None and tf.is_tensor(y):
        yield x, tf.cast(_ignore_labels(ignored, y.numpy()), y.dtype), outputs, weight


def _grow_by_row(values: Any) -> Any:
    """Return a different factor for each row, from 0.1 for the first to 2 for the last."""
    return np.linspace(0.1, 2.0, len(values)).reshape(-1, *[1] * (len(values.shape) - 1))


def _ignore_labels(padding: int, y: Any) -> Any:
    """Replace some labels of each row with `padding`, the class that the loss ignores.

    The number of replaced labels differs between rows.
    """
    # if rows have a single label, every third one is padding
    if y.ndim < 2 or y.shape[-1] < 2:
        return np.where(np.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1)) % 3 == 0, padding, y)
    rows = np.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1))
    return np.where(np.cumsum(np.ones_like(y), axis=-1) > 1 + rows % y.shape[-1], padding, y)


def _change_masks(outputs: Tensors) -> Tensors:
    """Return outputs with other masks, which select a different number of steps in each row.

    They select 1 time step of row 0, 2 of row 1, and so on.
    """
    changed = take_rows(outputs, len(keras.tree.flatten(outputs)[0]))
    for leaf in keras.tree.flatten(changed):
        mask = getattr(leaf, "_keras_mask", None)
        if mask is not None and mask.shape.rank > 1:
            rows, steps = np.indices(mask.shape)[:2]
            leaf._keras_mask = tf.constant(steps <= rows % mask.shape[1])
    return changed
