"""Parts of a training step that all engines share: rows, model calls, losses and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.framework.errors import InaccessibleTensorError

from ..errors import RequestError
from .compatibility import all_layers, check_assigned, warn
from .part_kinds import PartKinds, weigh_part

Tensors = Any  # nested tensors, as Keras passes them to a train step


class OwnRows(NamedTuple):
    """The rows of a global batch that this process computes.

    A process without rows has one filler row, and `size` is 0.
    """

    data: Tensors
    size: Any  # number of these rows that count
    rows: Any  # number of rows of the global batch
    whole: Tensors  # the global batch for the metrics; its x may be own rows only


def from_frame(leaf: Any) -> Any:
    """Convert pandas data to an array, a Series to one column; return other data unchanged."""
    array = leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf
    return array[:, None] if array is not leaf and array.ndim == 1 else array


def count_rows(data: Tensors) -> Any:
    """Return the batch's row count as an int64 tensor.

    Raises RequestError if there are no tensors.
    """
    for leaf in keras.tree.flatten(data):
        if leaf is not None:
            return tf.shape(leaf, out_type=tf.int64)[0]
    raise RequestError("A batch without any input can't be split.", "Give x.")


def cut_rows(data: Tensors, start: Any, stop: Any) -> Tensors:
    """Return rows `start` to `stop` of nested tensors.

    If the range is empty, return one row as a filler, because TensorFlow may abort on tensors
    without rows.
    """
    start, stop = widen_if_empty(start, stop)
    return _map(lambda tensor: _cut(tensor, start, stop), data)


def widen_if_empty(start: Any, stop: Any) -> tuple[Any, Any]:
    """Return the row range unchanged, or (0, 1) if it is empty."""
    is_empty = stop <= start
    return tf.where(is_empty, tf.zeros_like(start), start), tf.where(
        is_empty, tf.ones_like(stop), stop
    )


def open_rows(leaf: Any) -> Any:
    """Return the spec of a tensor, with any number of rows."""
    if leaf is None:
        return None
    shape = [None, *leaf.shape[1:]] if len(leaf.shape) else []
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, leaf.dtype)
    if isinstance(leaf, tf.RaggedTensor):
        splits = leaf.row_splits.dtype
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, splits)
    return tf.TensorSpec(shape, leaf.dtype)


def take_rows(data: Tensors, rows: Any) -> Tensors:
    """Return the first `rows` rows of nested tensors, with the masks and logits of Keras.

    Raises RequestError for a scalar.
    """
    return _map(
        lambda tensor: _attach_masks(_take(tensor, rows), [tensor], lambda marks: marks[0][:rows]),
        data,
    )


def pad_rows(tensor: Any, start: Any, rows: Any) -> Any:
    """Pad a tensor with zeros, so that it has `rows` rows and its own rows begin at row `start`.

    If each process pads its own rows in this way, the sum over all processes has all rows.
    """
    after = rows - start - tf.shape(tensor, tf.int64)[0]
    return tf.pad(tensor, [[start, after], *[[0, 0]] * (tensor.shape.rank - 1)])


def join_rows(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate tensors along their rows, with the masks and logits that Keras has attached."""
    return keras.tree.map_structure(
        lambda *tensors: _attach_masks(
            tf.concat(tensors, 0), tensors, lambda marks: tf.concat(marks, 0)
        ),
        *parts,
    )


def _cut(tensor: Any, start: Any, stop: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start:stop]
    first = tf.concat([[start], tf.zeros_like(tensor.dense_shape[1:])], 0)
    return tf.sparse.slice(tensor, first, tf.concat([[stop - start], tensor.dense_shape[1:]], 0))


def _take(tensor: Any, rows: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return _cut(tensor, tf.zeros_like(rows), rows)
    if tensor.shape.rank == 0:
        raise RequestError(
            "An output of the model is a single number, so it can't be put together from the "
            "devices' rows.",
            "Give it a value for each row, or use add_loss or a metric for it.",
        )
    return tensor[:rows]


def _map(function: Callable[[Any], Any], data: Tensors) -> Tensors:
    return keras.tree.map_structure(
        lambda tensor: None if tensor is None else function(tensor), data
    )


def _attach_masks(result: Any, sources: Sequence[Any], combine: Callable[[list[Any]], Any]) -> Any:
    """Attach the masks and logits of `sources` to `result`, which was computed from them.

    `combine` combines a list of masks into one mask, and a list of logits into one tensor. Masks
    are attached only if all sources have one; the same is true for logits.
    """
    masks = [getattr(source, "_keras_mask", None) for source in sources]
    if all(mask is not None for mask in masks):
        result._keras_mask = combine(masks)
    logits = [find_logits(source) for source in sources]
    if all(logit is not None for logit in logits):
        result._keras_logits = combine(logits)
    return result


def find_logits(tensor: Any) -> Any:
    """Return the logits from which a softmax or sigmoid output was computed, or None."""
    logits = getattr(tensor, "_keras_logits", None)
    if logits is None and tf.is_symbolic_tensor(tensor):
        operation = tensor.op
        return operation.inputs[0] if operation.type in ("Softmax", "Sigmoid") else None
    return logits


in_step = ContextVar("in_step", default=False)  # True while an engine calls the model

HEADROOM = 16.0  # a power of two, so that scaling doesn't round


@contextmanager
def engine_calls() -> Iterator[None]:
    """Context manager for the engine's own calls of the model; `warn_of_own_loop` ignores them."""
    token = in_step.set(True)
    try:
        yield
    finally:
        in_step.reset(token)


def build_model(model: Any, x: Tensors) -> None:
    """Create the weights that the model hasn't created yet, by calling it on a row of `x`."""
    if not all(layer.built for layer in (model, *all_layers(model))):
        call_once(model, x)


def call_once(model: Any, x: Tensors) -> Tensors:
    """Call the model on one row without side effects, or on all rows if that fails."""
    try:
        with keras.StatelessScope():
            return model(cut_rows(x, 0, 1), training=False)
    except (tf.errors.OpError, ValueError):
        with keras.StatelessScope():
            return model(x, training=False)


def call_model(model: Any, x: Tensors, training: bool) -> Tensors:
    """Call the model in the same way as Keras' steps."""
    with engine_calls():
        return model(x, training=training) if model._call_has_training_arg else model(x)


def warn_of_own_loop(model: Any) -> Callable[..., Any]:
    """Return a replacement for the model's `call` that warns about training outside of `fit`.

    In a training loop that users write themselves, one device computes the whole batch.
    """
    own = type(model).call

    @functools.wraps(own)
    def call(*given: Any, **words: Any) -> Any:
        if words.get("training") and not in_step.get():
            warn(
                f"{model.name} is called with training=True outside fit, and one device "
                f"computes the whole batch. "
                "Put the loop's loss into compute_loss, and call fit or train_on_batch."
            )
        return own(model, *given, **words)

    return call


class CopiesScope(keras.StatelessScope):  # type: ignore[misc]
    """Keras scope in which a call of the model uses copies of its weights.

    `states` are pairs of a non-trainable variable and its value. Values that the call assigns to
    variables are kept in the scope.
    """

    def __init__(
        self, model: Any, copies: Sequence[Any], states: Sequence[tuple[Any, Any]]
    ) -> None:
        self._weights = list(zip(model.trainable_variables, copies, strict=True))
        known = [*self._weights, *states]
        super().__init__(state_mapping=known, collect_losses=True)
        self._known = {id(variable) for variable, _ in known}
        self.others: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Record that the model's call assigns a variable."""
        variable, _ = update
        super().add_update(update)
        if id(variable) not in self._known:
            self.others[id(variable)] = variable

    def check_weights(self) -> None:
        """Raise RequestError if the model's call has assigned a trainable weight."""
        pairs = self._weights
        check_assigned([each for each, copy in pairs if self.get_current_value(each) is not copy])

    def assign_others(self) -> None:
        """Assign the values that the call has set for variables outside of `states`."""
        for key, variable in self.others.items():
            variable.assign(self.state_mapping[key])


def call_on_copies(
    model: Any, x: Tensors, training: bool, copies: Sequence[Any], states: Sequence[tuple[Any, Any]]
) -> tuple[Tensors, list[Any], list[Any], CopiesScope]:
    """Call the model on copies of its weights.

    `copies` are used instead of the trainable weights. `states` are pairs of a non-trainable
    variable and the value that the call reads. Returns the outputs, the losses that layers added,
    the regularizers' losses, and the scope, which keeps the values that the call assigned to
    variables. Raises RequestError if the call assigns a trainable weight.
    """
    with CopiesScope(model, copies, states) as scope:
        outputs, added, regularizers = call_in_scope(model, x, training)
    scope.check_weights()
    scope.assign_others()
    return outputs, added, regularizers, scope


def call_in_scope(model: Any, x: Tensors, training: bool) -> tuple[Tensors, list[Any], list[Any]]:
    """Call the model; return its outputs, losses that layers add, and regularizers' losses."""
    outputs = call_model(model, x, training)
    return outputs, *split_losses(model, list(model.losses))


def split_losses(model: Any, losses: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Divide a model's extra losses into those that layers add and those of regularizers."""
    # Keras lists the regularizers' losses last
    regularized = sum(
        getattr(weight, "regularizer", None) is not None for weight in model.trainable_weights
    )
    end = len(losses) - regularized
    return list(losses[:end]), list(losses[end:])


def compute_keras_loss(
    model: Any,
    added: Sequence[Any],
    x: Tensors,
    y: Tensors,
    outputs: Tensors,
    weight: Any,
    training: bool,
) -> Any:
    """Return a batch's loss as Keras computes it from `outputs`, plus the losses in `added`.

    If `added` isn't empty, it replaces the losses that the model's layers add (`model.losses`).
    """
    token = in_step.set(True)  # a compute_loss may call the model
    model._losses_override.extend(added)  # `model.losses` returns this list unless it is empty
    try:
        return model._compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=weight, training=training
        )
    finally:
        model._losses_override.clear()
        in_step.reset(token)


class PartLoss(NamedTuple):
    """How much some rows contribute to the loss of the whole batch.

    The fields differ if the loss has several values, such as one for each row: Keras learns from
    their sum, and logs their mean.
    """

    trained: Any  # scalar from which gradients are computed
    logged: Any  # scalar; those of all parts add up to the loss that Keras logs


def compute_loss_contribution(
    model: Any,
    kinds: PartKinds,
    losses: Sequence[Any],
    batch: Sequence[Any],
    training: bool,
    parts: tuple[Any, Any],
) -> PartLoss:
    """Return how much some rows contribute to the loss of the whole batch.

    - `kinds`: how the losses of parts combine.
    - `losses`: losses that layers added, then the regularizers' losses.
    - `batch`: (x, y, outputs, weight) of these rows.
    - `parts`: weights of `losses` and of the compiled loss. The first is the fraction of the
      batch's rows, the second the fraction of the tokens or other units that the loss is a mean
      over. Both are 0 for a filler row.
    """
    own = compute_compiled_loss(model, losses, batch, training)
    trained = logged = tf.reduce_sum(own) * tf.cast(parts[1], own.dtype)
    if own.shape.rank:
        logged = tf.reduce_mean(own) * tf.cast(parts[0], own.dtype)
    for place, loss in enumerate(losses):  # regularizers come last, and count by rows
        added = weigh_added(kinds.added_kind(place), loss, parts[0], own.dtype)
        trained, logged = trained + added, logged + added
    return PartLoss(trained, logged)


def compute_compiled_loss(
    model: Any, losses: Sequence[Any], batch: Sequence[Any], training: bool
) -> Any:
    """Return the compiled loss of some rows, without the losses of layers and regularizers.

    It isn't a scalar if the compiled loss doesn't reduce its values (`reduction=None`).
    """
    x, y, outputs, weight = batch
    nothing = [tf.zeros([], losses[0].dtype)] if losses else []
    return compute_keras_loss(model, nothing, x, y, outputs, weight, training)


def weigh_added(kind: str, loss: Any, part: Any, dtype: Any) -> Any:
    """Return a loss that a layer adds for a part of the batch, weighted by the part's size.

    `part` is the part's fraction of the rows. A loss of the kind "sum" isn't weighted.
    """
    return tf.reduce_sum(tf.cast(loss, dtype)) * tf.cast(weigh_part(kind, part), dtype)


def scale_loss(model: Any, loss: Any) -> Any:
    """Scale the loss for mixed precision, but less than Keras does.

    With Keras' scale, the sum of several parts' gradients could overflow in float16.
    `apply_gradients` undoes the difference.
    """
    return model.optimizer.scale_loss(loss) / _headroom(model)


def apply_gradients(model: Any, gradients: Sequence[Any]) -> None:
    """Update the model's weights with the gradients of a loss that `scale_loss` has scaled."""
    headroom, weights = _headroom(model), model.trainable_weights
    if headroom > 1:
        halves = [layer for layer in all_layers(model) if layer.compute_dtype == "float16"]
        half = {id(weight) for layer in halves for weight in layer._trainable_variables}
        pairs = zip(gradients, weights, strict=True)
        gradients = [
            _undo_headroom(gradient, headroom, id(weight) in half) for gradient, weight in pairs
        ]
    if weights:
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))


def _headroom(model: Any) -> float:
    return HEADROOM if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) else 1.0


def _undo_headroom(gradient: Any, headroom: float, is_half: bool) -> Any:
    """Multiply a gradient by `headroom`, because `scale_loss` has divided the loss by this number.

    If `is_half`, elements that overflow in float16 become NaN.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * headroom, gradient.indices, gradient.dense_shape)
    gradient *= headroom
    return (
        gradient + 0 * tf.cast(tf.cast(gradient, tf.float16), gradient.dtype)
        if is_half
        else gradient
    )


def update_metrics(
    model: Any, loss: Any, rows: Any, x: Tensors, y: Tensors, outputs: Tensors, weight: Any
) -> dict[str, Any]:
    """Update the model's metrics with the whole batch, and return the logs.

    `rows` is the batch's row count. Raises RequestError if `compute_metrics` reads a tensor that
    was computed from the rows of a single pass.
    """
    model._loss_tracker.update_state(loss, sample_weight=rows)
    try:
        logs: dict[str, Any] = model.compute_metrics(x, y, outputs, sample_weight=weight)
    except InaccessibleTensorError as error:
        raise RequestError(
            f"{type(model).__name__}.compute_metrics reads a tensor that call has left in an "
            f"attribute, and in passes that is of one pass's rows.",
            "Return it from call as another output, or make a plan without passes: evener balance "
            "--micro off.",
        ) from error
    return logs
