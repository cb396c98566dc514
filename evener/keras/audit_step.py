"""Traces a Keras training or test step, and runs it on a few rows without changing the model.

Audits use it to compare the gradients of two steps. Gradients are intercepted before the optimizer
applies them, and each is reduced to a few sums with random signs. All variables that the step
assigns are restored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_resource_variable_ops

from ..training.audit import PROJECTIONS, Sketch
from .attributes import CallTensors, Leaves, list_keras_attributes
from .compatibility import all_layers
from .decisions import Margins, Shifts, list_decisions, read_margin
from .equal_draws import draws_alike
from .instances import replaced
from .keras_step import Tensors, call_model, engine_calls
from .passes import SEED_NAME, is_seed
from .sparse_gradients import has_each_row_once, joins_look_ups

# parts of the names of random operations
DRAWING = ("Random", "Multinomial", "TruncatedNormal", "Rng")
SEED = (7, 7)
PLAIN = (bool, int, float, str, type(None))

Values = dict[int, Any]  # values of variables, by their keys


class StepCall(NamedTuple):
    """Results of the model's call in a step, which determine the step's loss.

    They are outputs, losses, and tensors that the call has stored in attributes.
    """

    outputs: Tensors  # with the masks that Keras attaches
    losses: list[Any]  # losses of layers, then of the weights' regularizers
    attributes: Leaves  # tensors that the call stored in attributes


class StepResult(NamedTuple):
    """Result of a traced step: gradients, metrics, assigned variables and outputs."""

    gradients: Sketch
    logs: dict[str, float]
    states: Values
    margins: Margins  # margins of the step's decisions
    outputs: list[Any]  # outputs of the model, each reduced to random projections of its rows
    call: StepCall | None  # None if the step isn't plain, or if its outputs aren't tensors


class StepVariable(NamedTuple):
    """A TensorFlow variable that a traced step reads or assigns."""

    key: int
    name: str
    handle: Any
    dtype: Any

    def read(self) -> Any:
        """Return the variable's value."""
        return gen_resource_variable_ops.read_variable_op(self.handle, self.dtype)

    def assign(self, value: Any) -> None:
        """Set the variable's value."""
        gen_resource_variable_ops.assign_variable_op(self.handle, value)


class TracedStep:
    """A training or test step as a TensorFlow graph; running it leaves all variables unchanged.

    - `step`: the function to trace, such as the model's `train_step`.
    - `spec`: element spec of a batch, with any row count.
    - `shifted`: whether to trace the step so that `run_shifted` can change the results of
      comparisons in the user's code, which shows whether the gradients depend on them.
    - `plain`: whether the step is Keras' own; then results include a `StepCall`.

    After tracing, `variables` are the variables that the step uses, by key, and `assigned` the keys
    of those that it may assign. `draws` is True if the step draws random numbers without
    keras.random. `merged` has the indices of the weights whose sparse gradients have at most one
    slice for each table row. `joined` names the weights whose sparse gradients come from several
    lookups (see `joins_look_ups`).
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[Tensors], Any],
        spec: Tensors,
        shifted: bool = False,
        plain: bool = False,
    ) -> None:
        self._model = model
        self._plain = plain
        self._left: Any = None  # the attributes after the model's call in a plain step
        self._shifts = Shifts() if shifted else None
        self._places: list[str] = []  # the place of each decision, in the form of find_line
        self._step = step
        self._kinds: dict[str, str] = {}  # types of gradients, by the weights' names
        self.merged: tuple[int, ...] = ()
        self.joined: list[str] = []
        kept = kept_attributes(model)
        with kept as self.attributes, draws_alike(model), engine_calls():
            traced = tf.function(self._run_step, autograph=False)
            seed = tf.TensorSpec([2], tf.int32)
            self._graph = traced.get_concrete_function(spec, seed)
        self.variables = {
            variable.key: variable for variable in _list_variables(model, self._graph.graph)
        }
        self.assigned = _find_assigned(self._graph.graph) & self.variables.keys()
        self.draws = any(map(_is_draw, _list_operations(self._graph.graph)))

    def run_shifted(self, data: Tensors, line: str, offsets: Sequence[Any]) -> StepResult:
        """Run the step with offsets that change comparisons in the user's code.

        `line` is the line of code with the comparisons. Each offset is added to the left side of
        one of them.
        """
        assert self._shifts is not None
        self._shifts.assign(line, offsets)
        try:
            return self.run(data)
        finally:
            self._shifts.clear()

    def run(self, data: Tensors, values: Mapping[int, Any] | None = None) -> StepResult:
        """Run the step on a batch, and restore all variables afterwards.

        `values` are temporary values of variables, by key.
        """
        given = {key: value for key, value in (values or {}).items() if key in self.variables}
        changed = [self.variables[key] for key in sorted(self.assigned | given.keys())]
        before = [(each, each.read()) for each in changed]
        try:
            for key, value in given.items():
                self.variables[key].assign(value)
            with _without_graph_optimization():
                sums, logs, margins, outputs, call = self._graph(data, tf.constant(SEED))
            states = {key: self.variables[key].read() for key in self.assigned}
        finally:
            for variable, value in before:
                variable.assign(value)
        numbers = _read_scalars(logs)
        sketch = Sketch({}, {}, numbers.get("loss", float("nan")))
        for name, each in zip(self._kinds, sums.numpy().tolist(), strict=True):
            sketch.add(name, self._kinds[name], each)
        by_place: Margins = {}
        for place, margin in zip(self._places, margins, strict=True):
            by_place.setdefault(place, []).append(margin.numpy())
        summed = [output.numpy() for output in outputs]
        return StepResult(sketch, numbers, states, by_place, summed, _restore_masks(call))

    def store_attributes(self, call: StepCall) -> None:
        """Store a call's tensors in the model's attributes, where a loss may read them."""
        self._left.restore()
        self._left.write(call.attributes)

    def _run_step(self, data: Tensors, seed: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Run the step and return its results as tensors; this function is traced as a graph."""
        # It returns five results. First, random projections of the gradients: a row for each
        # weight, in the order of `_kinds`. Then the logs, and the margins of decisions (left minus
        # right side), in the order of `_places`. Then random projections of the model's outputs.
        # Last, the fields of a `StepCall`, with the outputs' masks after the outputs. They are None
        # if the step isn't plain, or if its outputs aren't tensors. `seed` is the seed of the
        # random projections.
        found: list[tuple[Any, Any]] = []
        calls: list[tuple[Any, ...]] = []
        applies = replaced(self._model.optimizer, "apply_gradients", found.extend)
        with applies, self._recording_loss_calls(calls):
            self._model.reset_metrics()
            logs = self._step(keras.utils.pack_x_y_sample_weight(*data))
        reached = [(each, variable) for each, variable in found if each is not None]
        self._note_types([variable for _, variable in reached])
        self._note_sparse(reached)
        gradients = [each for each, _ in reached]
        sums = _project_gradients(gradients, [variable.shape for _, variable in reached], seed)
        margins = self._read_margins()  # read before operations are added that aren't the user's
        call = calls[-1] if calls else None
        leaves = [] if call is None else keras.tree.flatten(call[0])
        outputs = [_sum_rows(leaf, seed) for leaf in leaves if _has_rows(leaf)]
        if not all(tf.is_tensor(leaf) for leaf in leaves):
            call = None
        return sums, logs, margins, outputs, call

    def _note_types(self, variables: Sequence[Any]) -> None:
        """Record the dtype of each weight's gradient, by the weight's name."""
        names, half = _name_weights(self._model), computes_in_half(self._model)
        self._kinds.clear()
        for variable in variables:
            self._kinds[names[id(variable)]] = half or tf.as_dtype(variable.dtype).name

    def _note_sparse(self, reached: Sequence[tuple[Any, Any]]) -> None:
        """Record which gradients are sparse, and whether they may contain a table row twice.

        `reached` has a pair of gradient and variable for each weight that the step reaches.
        """
        once = {id(variable) for each, variable in reached if has_each_row_once(each)}
        weights = enumerate(self._model.trainable_weights)
        self.merged = tuple(place for place, each in weights if id(each) in once)
        self.joined = [variable.path for each, variable in reached if joins_look_ups(each)]

    @contextmanager
    def _recording_loss_calls(self, calls: list[tuple[Any, ...]]) -> Iterator[None]:
        """Context manager that records results of the model's call each time the loss is computed.

        Outputs, masks, losses that layers add, and attributes are appended to `calls`. Nothing is
        recorded unless the step is Keras' own.
        """
        # A record has the fields of a `StepCall`, with the outputs' masks after the outputs.
        if not self._plain:
            yield
            return
        model = self._model
        before = CallTensors(model)
        compute = model._compute_loss

        def compute_loss(*given: Any, **words: Any) -> Any:
            outputs = words.get("y_pred")
            masks = [getattr(leaf, "_keras_mask", None) for leaf in keras.tree.flatten(outputs)]
            attributes = {
                name: each for name, each in before.collect().items() if _is_usable_here(each)
            }
            calls.append((outputs, masks, list(model.losses), attributes))
            self._left = CallTensors(model)
            return compute(*given, **words)

        with replaced(model, "_compute_loss", compute_loss):
            yield

    def _read_margins(self) -> list[Any]:
        """Return the left side minus the right side of each comparison in the user's code."""
        found = list(list_decisions(tf.compat.v1.get_default_graph()))
        self._places[:] = [place for place, _ in found]
        margins = [read_margin(operation) for _, operation in found]
        if self._shifts is not None:
            for place, operation in found:
                self._shifts.insert(place, operation)
        return margins


class PlainSteps:
    """Traces and caches a model's own training and test steps, as Keras runs them on one device."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._traced: dict[tuple[bool, str, bool], TracedStep | Exception] = {}

    def clear(self, training: bool) -> None:
        """Forget the traced training steps or, with `training=False`, the traced test steps."""
        self._traced = {key: step for key, step in self._traced.items() if key[0] != training}

    def trace(self, spec: Tensors, training: bool) -> TracedStep:
        """Return Keras' own training or test step, traced for batches with this spec.

        Raises the error of the user's code, if any.
        """
        kind = type(self._model)
        own = functools.partial(kind.train_step if training else kind.test_step, self._model)
        return self._find((training, repr(spec), False), own, spec)

    def trace_call(self, spec: Tensors, training: bool) -> TracedStep:
        """Return a traced step that calls the model, but computes no loss.

        `training` is the mode in which the model is called. Raises the error of the user's code, if
        any.
        """
        call = functools.partial(_call_without_loss, self._model, training)
        without_loss = replaced(self._model, "_compute_loss", lambda **_: tf.zeros([]))
        with without_loss:
            return self._find((training, repr(spec), True), call, spec)

    def _find(self, key: tuple[bool, str, bool], step: Any, spec: Tensors) -> TracedStep:
        """Return the traced step for `key`; on the first use of this key, trace `step`.

        Raises the error of the user's code if tracing fails.
        """
        if key not in self._traced:
            self._traced[key] = self._trace(step, spec, training=key[0])
        found = self._traced[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _trace(self, step: Any, spec: Tensors, training: bool) -> TracedStep | Exception:
        try:
            with tf.device(self._device):
                return TracedStep(self._model, step, spec, shifted=training, plain=True)
        except Exception as error:  # any error of the user's program
            return error


def _call_without_loss(model: Any, training: bool, data: Tensors) -> dict[str, Any]:
    """Call the model as a step does, but compute no loss.

    The outputs are passed to the model's loss method, which `TracedStep` replaces to record them.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    # a `TracedStep` picks the outputs up there
    model._compute_loss(y_pred=call_model(model, x, training))
    return {}


LATE = 1_000_000  # a late step, by which everything that grows with the steps has grown


def list_states(model: Any, step: TracedStep) -> list[StepVariable]:
    """Return the variables that a step uses, except weights, metrics, optimizer state and seeds."""
    others = [
        *model.trainable_variables,
        *model.metrics_variables,
        *model.optimizer.variables,
        *(variable for variable in model.non_trainable_variables if is_seed(variable)),
    ]
    left_out = {id(each.value.handle) for each in others}
    return [
        each
        for key, each in step.variables.items()
        if key not in left_out and not each.name.endswith(SEED_NAME)
    ]


def replace_zeros(model: Any, step: TracedStep) -> tuple[Values, list[str]]:
    """Return nonzero values for variables that are all 0, and large values for step counters.

    With these values, a step shows effects that would otherwise only appear later in training.
    Returns a dict of the values, by the variables' keys, and a list of the variables' names.
    """
    values: Values = {}
    names = []
    moved = {state.key for state in list_states(model, step)}
    moved |= {id(each.value.handle) for each in model.trainable_variables}
    moved.add(id(model.optimizer._iterations.value.handle))
    for number, (key, variable) in enumerate(step.variables.items()):
        if key not in moved:
            continue
        value = variable.read()
        if value.dtype.is_floating and not bool(tf.reduce_any(value != 0)):
            drawn = tf.random.stateless_uniform(value.shape, (number, 4), 0.5, 1.0, tf.float32)
            scale = 1.0 if value.shape.rank == 0 else 0.2
            values[key] = tf.cast(scale * drawn, value.dtype)
        elif value.dtype.is_integer and value.shape.rank == 0:
            values[key] = value + tf.cast(LATE, value.dtype)
        else:
            continue
        names.append(variable.name)
    return values, names


def _restore_masks(call: Any) -> StepCall | None:
    """Return a StepCall with Keras' masks attached to its outputs again; None stays None.

    `call` has outputs, their masks, losses and attributes.
    """
    if call is None:
        return None
    outputs, masks, losses, attributes = call
    for leaf, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
        if mask is not None:
            leaf._keras_mask = mask
    return StepCall(outputs, losses, attributes)


def _is_usable_here(tensor: Any) -> bool:
    """Return whether a tensor is eager, or belongs to the current graph."""
    here = tf.compat.v1.get_default_graph()
    return not tf.is_symbolic_tensor(tensor) or tensor.graph is here


def _project_gradients(gradients: Sequence[Any], shapes: Sequence[Any], seed: Any) -> Any:
    """Reduce each gradient to a few sums of its elements, taken with random signs.

    `seed` determines the signs, so the sums of equal gradients are equal.
    """
    pairs = zip(gradients, shapes, strict=True)
    matrices = [_as_matrix(gradient, shape) for gradient, shape in pairs]
    if not matrices:
        return tf.zeros([0, PROJECTIONS], tf.float64)
    # an element's sign is the product of a sign of its row and of its column, so the sums are
    # matrix products and few signs are drawn; the mean square of the sums estimates the gradient's
    # squared norm
    order = sorted(range(len(matrices)), key=lambda place: matrices[place].shape[0] > 1)
    vectors = [each for each in matrices if each.shape[0] <= 1]
    larger = [each for each in matrices if each.shape[0] > 1]
    most_rows = max((each.shape[0] for each in larger), default=0)
    most_columns = max((each.shape[1] for each in larger), default=0)
    row_signs = _draw_signs(most_rows, seed)
    column_signs = _draw_signs(most_columns, seed + tf.constant([0, 1]))
    sums = [_sum_vectors(vectors, seed + tf.constant([0, 2]))] if vectors else []
    for matrix in larger:
        rows, columns = matrix.shape
        by_column = tf.matmul(matrix, column_signs[matrix.dtype][:columns])
        by_row = by_column * row_signs[matrix.dtype][:rows]
        sums.append(tf.cast(tf.reduce_sum(by_row, 0, keepdims=True), tf.float64))
    return tf.gather(tf.concat(sums, 0), np.argsort(order))


def _sum_vectors(vectors: Sequence[Any], seed: Any) -> Any:
    """Reduce the gradient of each vector, such as a bias, to a few sums with random signs.

    Each gradient is given as a matrix with a single row.
    """
    sizes = [vector.shape[1] for vector in vectors]
    # there are many of them, so they are computed together
    joined = tf.concat([tf.cast(vector, tf.float64) for vector in vectors], 1)
    signs = _draw_signs(sum(sizes), seed)[tf.float64]
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    signed = joined[0][:, None] * signs
    return tf.math.unsorted_segment_sum(signed, numbers, len(sizes))


def _as_matrix(gradient: Any, shape: Any) -> Any:
    """Return the gradient as a dense float matrix.

    The matrix has one column for each index of the weight's last axis. `shape` is the weight's
    shape.
    """
    dense = tf.convert_to_tensor(gradient)
    columns = shape[-1] if len(shape) else 1
    rows = math.prod(shape[:-1])
    if dense.dtype.is_complex:
        # separate rows for the real and the imaginary part
        dense = tf.stack([tf.math.real(dense), tf.math.imag(dense)])
        rows *= 2
    kind = tf.float64 if dense.dtype == tf.float64 else tf.float32
    return tf.reshape(tf.cast(dense, kind), [rows, columns])


def _has_rows(output: Any) -> bool:
    known = isinstance(output, tf.Tensor) and output.shape.rank
    return bool(known and (output.dtype.is_floating or output.dtype.is_complex))


def _sum_rows(output: Any, seed: Any) -> Any:
    """Reduce each row of a model's output to a few sums with random signs."""
    if output.dtype.is_complex:
        output = tf.stack([tf.math.real(output), tf.math.imag(output)], -1)
    flat = tf.cast(output, tf.float64 if output.dtype == tf.float64 else tf.float32)
    columns = tf.shape(flat)[-1] if flat.shape.rank > 1 else 1
    matrices = tf.reshape(flat, [tf.shape(flat)[0], -1, columns])
    drawn = tf.random.stateless_uniform([columns, PROJECTIONS], seed, 0, 2, tf.int32)
    along = tf.linalg.matmul(matrices, tf.cast(2 * drawn - 1, flat.dtype))
    weights = tf.linspace(tf.ones([], flat.dtype), 2.0, tf.shape(matrices)[1])
    return tf.cast(tf.reduce_sum(along * weights[:, None], 1), tf.float64)


def _draw_signs(count: int, seed: Any) -> dict[Any, Any]:
    """Draw a matrix of random signs, and return it as float32 and as float64.

    It has `count` rows and PROJECTIONS columns of 1 and -1.
    """
    drawn = 2 * tf.random.stateless_uniform([count, PROJECTIONS], seed, 0, 2, tf.int32) - 1
    return {kind: tf.cast(drawn, kind) for kind in (tf.float32, tf.float64)}


def _read_scalars(logs: Any) -> dict[str, float]:
    """Return the scalar metrics in a step's logs, as floats.

    Metrics in nested dicts are included.
    """
    # a dictionary's names aren't prefixed, as in Keras' own logs
    scalars: dict[str, float] = {}
    for name, given in logs.items() if isinstance(logs, dict) else ():
        if isinstance(given, dict):
            scalars |= _read_scalars(given)
            continue
        tensor = tf.convert_to_tensor(given)
        if tensor.shape.rank == 0:
            scalars[name] = float(tensor)
    return scalars


def _name_weights(model: Any) -> dict[int, str]:
    """Return a unique name for each trainable weight, by the weight's `id()`.

    The names are the weights' paths; a path that occurs twice is numbered.
    """
    names: dict[int, str] = {}
    for weight in model.trainable_weights:
        path = weight.path
        taken = sum(name.partition(" (")[0] == path for name in names.values())
        names[id(weight)] = f"{path} ({taken + 1})" if taken else path
    return names


def computes_in_half(model: Any) -> str:
    """Return "bfloat16" or "float16" if any layer computes in it, else ""."""
    kinds = {layer.compute_dtype for layer in (model, *all_layers(model))}
    return next((kind for kind in ("bfloat16", "float16") if kind in kinds), "")


def _list_variables(model: Any, graph: Any) -> Iterator[StepVariable]:
    """Yield the variables that a traced graph uses."""
    known = {}
    every = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    for variable in every:
        known[id(variable.value.handle)] = variable.path
    for variable in graph.variables:
        known.setdefault(id(variable.handle), variable.name.partition(":")[0])
    for outer, _ in graph.captures:
        if outer.dtype != tf.resource:
            continue
        described = getattr(outer, "_handle_data", None)
        if described is None or not described.is_set or len(described.shape_and_type) != 1:
            continue  # a table or a queue
        name = known.get(id(outer), "a variable")
        kind = tf.as_dtype(described.shape_and_type[0].dtype)
        yield StepVariable(id(outer), name, outer, kind)


READING = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "Shape")


def _find_assigned(graph: Any) -> set[int]:
    """Return the keys of the variables that a traced graph may assign."""
    # all captured variables except those that are used only by operations in READING
    found = set()
    for outer, inner in graph.captures:
        uses = {operation.type for operation in inner.consumers()}
        if outer.dtype == tf.resource and not uses <= set(READING):
            found.add(id(outer))
    return found


def _list_operations(graph: Any) -> Iterator[str]:
    """Yield the types of all operations in the graph, and in functions that it calls."""
    definition = graph.as_graph_def()
    yield from (node.op for node in definition.node)
    for function in definition.library.function:
        yield from (node.op for node in function.node_def)


def _is_draw(operation: str) -> bool:
    known = operation.startswith("Stateless") or "Dataset" in operation
    return not known and any(word in operation for word in DRAWING)


@contextmanager
def _without_graph_optimization() -> Iterator[None]:
    """Context manager that turns off Grappler, TensorFlow's graph optimizer, in this thread."""
    now = context.context()
    before = now.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    # the optimization takes longer than the few runs of an audit
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    now.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        now.function_call_options = before


@contextmanager
def kept_attributes(model: Any) -> Iterator[dict[str, Any]]:
    """Context manager that restores attributes of the model, its layers and its loss at the end.

    Attributes that hold tensors or plain values (numbers, strings, bools or None) are restored.
    Yields a dict that stays empty until the context ends. It then gets the plain values that were
    changed in the context, as they were before the restore, by names such as "my_layer.counter".
    """
    left = CallTensors(model)
    every = [each for each in (model, *all_layers(model), model.loss) if hasattr(each, "__dict__")]
    before = [
        {name: value for name, value in vars(each).items() if isinstance(value, PLAIN)}
        for each in every
    ]
    changed: dict[str, Any] = {}
    try:
        yield changed
    finally:
        left.restore()
        for owner, plain in zip(every, before, strict=True):
            changed |= _restore_plain(owner, plain)


def _restore_plain(owner: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Restore those attributes of an object that are numbers, strings, bools or None.

    `plain` has the values to restore. Returns the values that were replaced.
    """
    holder = vars(owner)
    changed = {}
    for name, value in plain.items():
        now = holder.get(name)
        if name in list_keras_attributes() or not isinstance(now, PLAIN) or now == value:
            continue
        changed[f"{getattr(owner, 'name', 'the loss')}.{name}"] = now
        holder[name] = value
    return changed
