"""Batches for `fit` and `evaluate`, made from arrays or datasets.

Each device may get rows of similar length. The order of an epoch's rows follows from one random
number. So the rows of any step can be computed directly, and a process gathers only its own rows of
a global batch.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ..errors import RequestError
from ..shares.divisions import Cut
from ..training.row_assignment import RowAssigner
from .compatibility import all_layers
from .keras_step import OwnRows, Tensors, call_model, cut_rows, widen_if_empty

SAME = 1e-3  # maximum difference of equal outputs, relative to the largest output

_MASK = "Mask it, as Embedding(mask_zero=True) and Masking do, or train without lengths."


class AssignedArrays(NamedTuple):
    """A batch whose rows were assigned to devices by length, and are sorted by device."""

    data: Tensors
    edges: Any  # the first row of each device, then the number of rows
    longest: Any  # tokens in each device's longest row


def assign_arrays(assigner: RowAssigner, tokens: Any) -> tuple[Any, Any, Any]:
    """Assign a batch's rows to devices by their token counts, in a TensorFlow graph.

    Returns three tensors: the row indices, sorted by device; the position of each device's first
    row in them, followed by the row count; and the token count of each device's longest row.
    """

    def assign(lengths: Any) -> tuple[Any, ...]:
        assigned = assigner.assign(lengths.tolist())
        own = [[row for each in passes for row in each] for passes in assigned.passes]
        edges = np.cumsum([0, *map(len, own)], dtype=np.int64)
        longest = [max((1, *(int(lengths[row]) for row in rows))) for rows in own]
        return (
            np.array([row for rows in own for row in rows], np.int64),
            edges,
            np.array(longest, np.int64),
        )

    order, edges, longest = tf.numpy_function(assign, [tokens], [tf.int64] * 3)
    devices = len(assigner.ranks)
    return (
        tf.ensure_shape(order, [None]),
        tf.ensure_shape(edges, [devices + 1]),
        tf.ensure_shape(longest, [devices]),
    )


def read_lengths(lengths: Any, x: Tensors, rows: int, assigner: RowAssigner) -> Any:
    """Check token counts that the user has given, and return them as an int64 array.

    Raises RequestError if they aren't one whole number per row, don't fit `x`, or if a row fits on
    no device.
    """
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(
            f"lengths={type(lengths).__name__} isn't a list of whole numbers.",
            "Give the tokens of each row, in order.",
        )
    assigner.check(tokens.tolist(), rows)
    _check_padding(tokens, _count_steps(x))
    return tokens.astype(np.int64)


def _check_padding(tokens: Any, steps: int | None) -> None:
    """Raise RequestError if a row has more tokens than the second axis of the padded arrays.

    `steps` is the length of that axis, or None without one.
    """
    if steps is None or tokens.max() > steps:
        held = "no second axis" if steps is None else f"a second axis of {steps}"
        raise RequestError(
            f"Row {int(tokens.argmax())} has {int(tokens.max())} tokens, but x has {held}.",
            "Give padded arrays, whose second axis is as long as the longest row.",
        )


def cut_pieces(x: Tensors, assigned: AssignedArrays) -> list[tuple[Tensors, Any]]:
    """Return a pair for each device: its inputs, and their row count without filler rows.

    The inputs are trimmed to the length of the device's longest row.
    """
    with tf.device("CPU:0"):
        edges, longest = tf.unstack(assigned.edges), tf.unstack(assigned.longest)
        return [
            (cut_steps(cut_rows(x, start, stop), most), stop - start)
            for (start, stop), most in zip(pairwise(edges), longest, strict=True)
        ]


def cut_steps(x: Tensors, steps: Any) -> Tensors:
    """Cut the inputs to the first `steps` tokens, along their second axis.

    Tensors whose second axis isn't as long as the first tensor's aren't cut.
    """
    whole = _count_steps(x)
    return keras.tree.map_structure(
        lambda each: each[:, :steps] if each.shape.rank > 1 and each.shape[1] == whole else each, x
    )


def pad_steps(outputs: Tensors, x: Tensors) -> Tensors:
    """Pad a model's outputs with zeros along the second axis, to the length of the inputs `x`.

    Outputs whose second axis has a fixed length aren't padded. Masks exclude the padding.
    """
    whole = _count_steps(x)

    def pad(tensor: Any) -> Any:
        if tensor.shape.rank < 2 or tensor.shape[1] is not None:
            return tensor
        width = [[0, 0], [0, whole - tf.shape(tensor)[1]]]
        padded = tf.pad(tensor, [*width, *([[0, 0]] * (tensor.shape.rank - 2))])
        padded.set_shape([None, whole, *tensor.shape[2:]])
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            padded._keras_mask = tf.pad(mask, width)
        logits = getattr(tensor, "_keras_logits", None)
        if logits is not None:
            padded._keras_logits = pad(logits)
        return padded

    return keras.tree.map_structure(pad, outputs)


def check_padding(model: Any, batch: AssignedArrays) -> None:
    """Raise RequestError if padding changes the model's outputs or counts in its loss.

    One row is computed with and without padding. RequestError is also raised for eager models and
    for models with batch normalization.
    """
    if model.run_eagerly:
        raise RequestError(
            "Rows can't be assigned by length eagerly.", "Compile with run_eagerly=False."
        )
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in all_layers(model)):
        raise RequestError(
            "Batch normalization counts padding in its statistics.", "Train without lengths."
        )
    x, _, weight = keras.utils.unpack_x_y_sample_weight(batch.data)
    longest, sizes = batch.longest.numpy(), np.diff(batch.edges.numpy())
    device = int(np.where(sizes > 0, longest, longest.max() + 1).argmin())
    place, steps = int(batch.edges[device]), int(longest[device])
    row, weights = (cut_rows(each, place, place + 1) for each in (x, weight))
    whole = keras.tree.flatten(call_model(model, row, False))
    try:
        short = keras.tree.flatten(call_model(model, cut_steps(row, steps), False))
    except (ValueError, tf.errors.OpError) as error:
        raise RequestError(
            f"{model.name} can't compute a row of {steps} tokens that isn't padded: "
            f"{str(error).splitlines()[0]}",
            "Leave the length of its input open, as Input((None,)) does, or train without lengths.",
        ) from None
    for one, other in zip(whole, short, strict=True):
        _check_output(one, other, steps, keras.tree.flatten(weights))


def _check_output(whole: Any, short: Any, steps: int, weights: list[Any]) -> None:
    """Raise RequestError if a row's output depends on padding, or if the loss counts padding.

    `whole` is the output of the padded row, and `short` that of the row without padding, which has
    `steps` tokens. The loss ignores padding that a mask or one of the `weights` excludes.
    """
    if whole.shape != short.shape:
        counted = [
            getattr(whole, "_keras_mask", None),
            *(weight for weight in weights if weight is not None),
        ]
        marks = [
            tf.cast(each[:, steps:], tf.bool)
            for each in counted
            if each is not None and each.shape.rank > 1
        ]
        if not marks or bool(tf.reduce_any(tf.reduce_all(tf.stack(marks), 0))):
            raise RequestError(
                "The loss counts padding: no mask reaches it, and no weights are 0 there.",
                (
                    "Mask it, as Embedding(mask_zero=True) does, or give a sample_weight for each "
                    "token."
                ),
            )
        whole = whole[:, :steps]
    one, other = np.asarray(whole, np.float64), np.asarray(short, np.float64)
    if one.shape != other.shape or np.abs(one - other).max(initial=0.0) > SAME * np.abs(one).max(
        initial=0.0
    ):
        raise RequestError(
            "The model computes a different output for a row without its padding.", _MASK
        )


def _count_steps(x: Tensors) -> int | None:
    """Return the length of the second axis of the first input, or None if it has none."""
    shape = keras.tree.flatten(x)[0].shape
    return shape[1] if len(shape) > 1 else None


PREFETCHED_BATCHES = 2
ENDLESS_STEPS = 1 << 62
MOST_THREADS = 4  # maximum number of threads that gather rows at the same time

# faster to trace; only for functions without tensors in their conditions
identity = tf.autograph.experimental.do_not_convert
# (epoch, first row, row after the last) -> an element of a dataset
Take = Callable[[Any, Any, Any], Any]


class ArrayBatches:
    """Makes TensorFlow datasets of batches from arrays.

    - `batch`: rows in a batch; an epoch's last batch may be smaller.
    - `shuffle`: use a different order of rows in each epoch, which depends on `seed`.
    - `rows`: rows in an epoch, by default those of the arrays. If there are more, rows repeat.

    Raises RequestError if the arrays differ in their row count, or have no rows.
    """

    def __init__(
        self, data: Any, batch: int, shuffle: bool = False, seed: int = 0, rows: int | None = None
    ) -> None:
        self._length = count_array_rows(data)
        self._tensors = keras.tree.map_structure(_to_tensor, keras.tree.lists_to_tuples(data))
        self.rows = rows or self._length
        self.batch = batch
        self._shuffle = shuffle
        self._seed = seed

    @property
    def steps(self) -> int:
        """Number of batches in an epoch."""
        return math.ceil(self.rows / self.batch)

    def global_batches(self, endless: bool = False) -> Any:
        """Return a dataset of global batches, which have the rows of all processes.

        It never ends if it is `endless`, and otherwise ends after one epoch.
        """
        return self._dataset(functools.partial(self._take, self._tensors), endless)

    def own_rows(self, cut: Cut, rank: int, endless: bool = False) -> Any:
        """Return a dataset with those rows of each global batch that process `rank` computes.

        The elements are `OwnRows`. The dataset never ends if it is `endless`, and otherwise ends
        after one epoch.
        """

        def take_own(epoch: Any, start: Any, stop: Any) -> OwnRows:
            first, last = cut.bounds(stop - start)[rank : rank + 2]
            begin, end = widen_if_empty(first, last)
            own = self._take(self._tensors, epoch, start + begin, start + end)
            whole = own[0], *self._take(self._tensors[1:], epoch, start, stop)
            return OwnRows(own, last - first, stop - start, whole)

        return self._dataset(take_own, endless)

    def assigned_rows(self, tokens: Any, assigner: RowAssigner) -> Any:
        """Return a dataset of batches whose rows are assigned to devices by their token counts."""

        def take_assigned(epoch: Any, start: Any, stop: Any) -> AssignedArrays:
            places = self._find_rows(epoch, start, stop)
            order, edges, longest = assign_arrays(assigner, tf.gather(tokens, places))
            return AssignedArrays(_gather(self._tensors, tf.gather(places, order)), edges, longest)

        return self._dataset(take_assigned, endless=False)

    def _dataset(self, take: Take, endless: bool) -> Any:
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))

        def make(epoch: Any, step: Any) -> Any:
            with tf.device("CPU:0"):
                start = step * self.batch
                return take(epoch, start, tf.minimum(start + self.batch, self.rows))

        calls: Any = {"num_parallel_calls": threads, "deterministic": True}
        if not endless and self._shuffle:
            return self._shuffled().map(identity(make), **calls).prefetch(PREFETCHED_BATCHES)
        numbers = tf.data.Dataset.range(ENDLESS_STEPS if endless else self.steps)
        follow = identity(lambda number: make(number // self.steps, number % self.steps))
        dataset = numbers.map(follow, **calls).prefetch(PREFETCHED_BATCHES)
        return dataset.with_options(_make_thread_options(threads)) if endless else dataset

    def _shuffled(self) -> Any:
        """Return a dataset with the pair (epoch number, step) for each step of an epoch.

        The epoch number is a random number, which determines the order of the epoch's rows. It is
        the same in all steps of an epoch.
        """
        steps = tf.data.Dataset.range(self.steps)
        # each iteration over the dataset yields another epoch
        epoch = tf.data.Dataset.random(seed=self._seed, rerandomize_each_iteration=True).take(1)
        numbers = epoch.flat_map(
            identity(lambda number: steps.map(identity(lambda step: (number, step))))
        )
        return numbers.apply(tf.data.experimental.assert_cardinality(self.steps))

    def _take(self, tensors: Any, epoch: Any, start: Any, stop: Any) -> Any:
        if not self._shuffle and self.rows == self._length:
            return keras.tree.map_structure(lambda tensor: tensor[start:stop], tensors)
        return _gather(tensors, self._find_rows(epoch, start, stop))

    def _find_rows(self, epoch: Any, start: Any, stop: Any) -> Any:
        """Return the array indices of rows `start` to `stop` in the order of an epoch.

        `epoch` is the epoch's random number, which determines the order.
        """
        places = tf.range(start, stop)
        if self._shuffle:
            key = tf.stack([tf.constant(self._seed, tf.int64), epoch])
            places = tf.random.experimental.index_shuffle(places, seed=key, max_index=self.rows - 1)
        return places % self._length


def pack_arrays(
    x: Any, y: Any = None, weight: Any = None, class_weight: Any = None
) -> tuple[Any, ...]:
    """Return `(x, y, weight)` without the items that are None.

    With `class_weight`, the weight of each sample is that of its label's class. Raises RequestError
    if sample weights are given without `y` or together with `class_weight`.
    """
    weight = _apply_class_weight(y, weight, class_weight)
    if y is None and weight is not None:
        raise RequestError("Sample weights are given without y.", "Give y too.")
    return tuple(each for each in (x, y, weight) if each is not None)


def count_array_rows(data: Any) -> int:
    """Return the number of rows of the arrays, which has to be the same for all.

    Raises RequestError if the arrays differ in their row count, or have no rows.
    """
    shapes = [array.shape for array in keras.tree.flatten(data) if array is not None]
    if not all(shapes):
        raise RequestError(
            "A list of single numbers has no rows.", "Give an array: numpy.asarray(...)."
        )
    counts = {int(shape[0]) for shape in shapes}
    if len(counts) != 1:
        raise RequestError(
            f"The arrays have {sorted(counts)} rows.", "Give arrays with the same number of rows."
        )
    (rows,) = counts
    if rows == 0:
        raise RequestError("The arrays have no rows.", "Give at least one sample.")
    return rows


def are_arrays(x: Any) -> bool:
    """Return whether `x` consists of arrays or tensors only."""
    if isinstance(x, tf.data.Dataset):
        return False
    return all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in tf.nest.flatten(x))


def _apply_class_weight(
    y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None
) -> Any:
    """Return `sample_weight` or, with `class_weight`, the weight of each label's class.

    Classes that `class_weight` lacks have the weight 1. Raises RequestError if both are given, or
    if a sample has several labels.
    """
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise RequestError("Both class_weight and sample_weight are given.", "Give one of them.")
    labels = np.asarray(y)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        labels = labels.argmax(-1)
    labels = labels.reshape(len(labels), -1)
    if labels.shape[1] != 1:
        raise RequestError(
            "class_weight needs one label for each sample.", "Give sample_weight instead."
        )
    table = np.vectorize(lambda label: float(class_weight.get(int(label), 1.0)), otypes=[float])
    # as in Keras, a label such as 0.9999999, the result of a division, is the nearest class
    return table(np.round(labels[:, 0])).astype(keras.config.floatx())


def batch_samples(dataset: Any, size: int | None, inputs: Any = None) -> Any:
    """Divide a dataset into batches of `size`, unless it yields batches already.

    Raises RequestError if it yields samples and `size` is None. `inputs` are the model's inputs, or
    None if unknown.
    """
    if gives_batches(dataset, inputs) is not False:
        return dataset
    if not size:
        raise RequestError(
            "The dataset gives single samples, not batches.", "Batch them: dataset.batch(n)."
        )
    return dataset.batch(size).prefetch(PREFETCHED_BATCHES)


def gives_batches(dataset: Any, inputs: Any = None) -> bool | None:
    """Return whether a dataset yields batches rather than samples.

    The result is None if its spec doesn't show this. `inputs` are the model's inputs, or None if
    unknown.
    """
    spec = dataset.element_spec
    if isinstance(spec, AssignedArrays):
        return True
    shapes = [getattr(leaf, "shape", tf.TensorShape(None)) for leaf in tf.nest.flatten(spec)]
    if not shapes or any(shape.rank is None for shape in shapes):
        return None
    if any(shape.rank == 0 for shape in shapes):
        return False
    x = shapes[: len(tf.nest.flatten(spec[0] if type(spec) is tuple else spec))]
    if inputs and len(x) == len(inputs):
        return not _are_samples(x, inputs)
    return _have_batch_axis(shapes)


def _are_samples(x: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Return whether tensors with the shapes `x` are single samples of the model's inputs.

    A sample has each input's shape without the batch axis.
    """
    missing = sum(len(each.shape) for each in inputs) - sum(shape.rank for shape in x)
    if missing != len(inputs):
        return False
    # a first axis without a fixed length may be a batch axis after all
    open_inputs = any(size is None for each in inputs for size in each.shape[1:])
    return open_inputs or any(shape[0] is not None for shape in x)


def _have_batch_axis(shapes: Sequence[Any]) -> bool | None:
    """Return whether the first axes of the shapes look like a batch axis; None if unclear."""
    leading = {shape[0] for shape in shapes}
    # in batches, the first axis of every shape has an unknown length
    if leading == {None}:
        return True
    # first axes of different lengths aren't numbers of rows; an unknown one may be
    if len(leading) > 1 and None not in leading:
        return False
    return None


def batch_rows(dataset: Any) -> int | None:
    """Return the dataset's batch size, or None if it is unknown."""
    shape = getattr(tf.nest.flatten(dataset.element_spec)[0], "shape", None)
    if shape is not None and shape.rank and shape[0] is not None:
        return int(shape[0])
    while dataset is not None:
        # set on the result of batch(); TensorFlow has no public attribute for it
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            return int(size)
        dataset = getattr(dataset, "_input_dataset", None)
    return None


def is_plain(fit_arguments: dict[str, Any], model: Any) -> bool:
    """Return whether evener can make the batches for `fit` itself.

    This requires that the data are plain arrays, every epoch uses all rows, and Keras runs one step
    per call.
    """
    return (
        _are_dense_arrays(fit_arguments)
        and not _weighs_nested_targets(fit_arguments)
        and _trains_whole_epochs(fit_arguments)
        and isinstance(fit_arguments["shuffle"], bool)
        and model.steps_per_execution == 1
    )


def _are_dense_arrays(fit_arguments: dict[str, Any]) -> bool:
    """Return whether inputs, labels and weights are dense arrays."""
    # not ragged or sparse tensors, datasets, generators, or arrays of Python objects
    given = tf.nest.flatten(
        [fit_arguments["x"], fit_arguments["y"], fit_arguments["sample_weight"]]
    )
    leaves = [leaf for leaf in given if leaf is not None]
    return all(_is_dense_array(leaf) for leaf in leaves)


def _is_dense_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | tf.Tensor) and leaf.dtype != object


def _weighs_nested_targets(fit_arguments: dict[str, Any]) -> bool:
    """Return whether there are sample or class weights, and the labels are a nested structure."""
    is_weighted = (
        fit_arguments["sample_weight"] is not None or fit_arguments["class_weight"] is not None
    )
    return is_weighted and tf.nest.is_nested(fit_arguments["y"])


def _trains_whole_epochs(fit_arguments: dict[str, Any]) -> bool:
    """Return whether every epoch of `fit` uses all rows of the arrays."""
    return not fit_arguments["validation_split"] and fit_arguments["steps_per_epoch"] is None


def split_for_validation(fit_arguments: dict[str, Any]) -> None:
    """Carry out `validation_split`: move the last rows to `validation_data`, in place.

    `fit_arguments` has the arguments of `fit`. An argument `validation_data` has priority over the
    split. Raises RequestError if no rows would be left to train on or to validate.
    """
    part = fit_arguments["validation_split"]
    fit_arguments["validation_split"] = 0.0
    if fit_arguments["validation_data"] is not None:
        return
    names = ("x", "y", "sample_weight")
    rows = count_array_rows([fit_arguments[name] for name in names])
    first = math.floor(rows * (1.0 - part))
    if first in (0, rows):
        raise RequestError(
            f"validation_split={part} of {rows} rows leaves none to train on, or to validate.",
            "Give another part.",
        )
    held = [_cut_arrays(fit_arguments[name], slice(first, None)) for name in names]
    fit_arguments["validation_data"] = tuple(each for each in held if each is not None)
    fit_arguments |= {name: _cut_arrays(fit_arguments[name], slice(first)) for name in names}


def _cut_arrays(arrays: Any, rows: slice) -> Any:
    return keras.tree.map_structure(lambda each: None if each is None else each[rows], arrays)


def _gather(tensors: Any, places: Any) -> Any:
    return keras.tree.map_structure(lambda tensor: tf.gather(tensor, places), tensors)


def _to_tensor(array: Any) -> Any:
    """Return the array as a tensor on the CPU; floats get Keras' default dtype."""
    with tf.device("CPU:0"):
        tensor = array if isinstance(array, tf.RaggedTensor) else tf.convert_to_tensor(array)
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor


def _make_thread_options(count: int) -> Any:
    """Return options that give a dataset its own pool of `count` threads."""
    # in TensorFlow's shared pool, a waiting collective or the training could delay a batch
    options = tf.data.Options()
    options.threading.private_threadpool_size = count
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    return options
