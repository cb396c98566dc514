"""Workloads made of a compiled Keras model and its training data.

Steps are the same as in `fit`: one traced function with relaxed shapes computes all batch sizes,
and batches come from host memory through the input pipeline that training uses.

Rows of the user's `training_data` are read as in training. If there is only `sample_batch`, it
creates a fixed set of rows, more than fit in a processor's cache. These are reused in random order.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from evener.errors import RequestError
from evener.keras.compatibility import all_layers, model_digest
from evener.keras.data import ArrayBatches, count_array_rows, identity
from evener.keras.keras_step import build_model
from evener.keras.measure_kinds import build_variables
from evener.keras.split import Split
from evener.keras.step_times import StepTimes
from evener.keras.tf_devices import make_logical_cpus

from ..protocol import LEFT_BYTES, MemoryMeter, PhaseSeconds, WorkerSetup, Workload
from .steps import KerasSteps, TrainStep

SampleBatch = Callable[[int], tuple[Any, Any]]  # n -> (x, y), n rows each
POOL_BYTES = 64 << 20
FEWEST_ROWS = 64
MOST_ROWS = 1 << 16


class KerasData(NamedTuple):
    """Training data of a Keras workload.

    `batches` is a function that takes a `Split` and a batch size, and returns endless batches.
    """

    batches: Callable[[Split, int], Any]
    rows: int = 0  # rows per epoch; 0: unknown


def make_row_data(arrays: tuple[Any, ...], is_synthetic: bool = False) -> KerasData:
    """Return training data that draws shuffled batches from arrays.

    With `is_synthetic`, the number of rows isn't reported as the size of the data set.
    """
    length = count_array_rows(arrays)

    def batches(split: Split, batch: int) -> Any:
        rows = batch * max(1, length // batch)
        loader = ArrayBatches(arrays, batch, shuffle=True, rows=rows)
        if split.group is None:
            return loader.global_batches(endless=True)
        return loader.own_rows(split.cut, split.group.rank, endless=True)

    return KerasData(batches, 0 if is_synthetic else length)


def make_stream_data(make_dataset: Callable[[int], Any], rows: int = 0) -> KerasData:
    """Return training data from a function that creates a `tf.data.Dataset` for a batch size.

    When batches are requested, `RequestError` is raised if the function doesn't return a dataset,
    or if the first batch doesn't have the requested size. Later batches of another size, such as
    the last one of an epoch, are skipped.
    """

    def batches(_: Split, batch: int) -> Any:
        data = make_dataset(batch)
        if not isinstance(data, tf.data.Dataset):
            raise RequestError(
                f"training_data() gives an object of type {type(data).__name__} for a batch "
                f"of {batch}.",
                "Give a tf.data.Dataset.",
            )
        shape = next((tf.nest.flatten(element)[0].shape for element in data.take(1)), [0])
        found = int(shape[0]) if len(shape) else 0
        if found != batch:
            raise RequestError(
                f"training_data() gives a batch of {found} rows instead of {batch}.",
                (
                    "Batch by the size that it is called with, from a data set that has at least "
                    "that many rows."
                ),
            )
        return data.filter(
            identity(lambda *each: tf.equal(tf.shape(tf.nest.flatten(each)[0])[0], batch))
        ).repeat()

    return KerasData(batches, rows)


def make_pool_data(sample_batch: SampleBatch) -> KerasData:
    """Return training data with rows from `sample_batch`: as many rows as fit in 64 MiB.

    There are at least 64 and at most 65,536 rows.
    """
    few = as_arrays(sample_batch(2))
    row_bytes = max(1, sum(leaf.nbytes for leaf in keras.tree.flatten(few)) // 2)
    count = min(max(POOL_BYTES // row_bytes, FEWEST_ROWS), MOST_ROWS)
    with tf.device("CPU:0"):
        return make_row_data(
            keras.tree.map_structure(tf.convert_to_tensor, as_arrays(sample_batch(count))),
            is_synthetic=True,
        )


def as_training_data(data: Any) -> KerasData:
    """Convert what the user's `training_data()` has returned.

    It may be a tuple (x, y) or (x, y, weights), a `tf.data.Dataset` of single samples, or a
    function that returns a dataset for a batch size. Raises `RequestError` for anything else.
    """
    if isinstance(data, tf.data.Dataset):
        rows = max(0, int(data.cardinality()))  # negative: unknown, or endless
        return make_stream_data(lambda batch: data.batch(batch).prefetch(tf.data.AUTOTUNE), rows)
    if callable(data):
        return make_stream_data(data)
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        raise RequestError(
            f"training_data() gives an object of type {type(data).__name__}.",
            (
                "Return arrays (x, y), a tf.data.Dataset of single samples, or a function that "
                "makes one of n-row batches."
            ),
        )
    return make_row_data(as_arrays(data))


def as_arrays(data: tuple[Any, ...]) -> Any:
    """Convert the leaves of a nested structure to NumPy arrays.

    Floating-point numbers are converted to Keras's default type.
    """

    def convert(each: Any) -> Any:
        array = np.asarray(each)
        return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array

    return keras.tree.map_structure(convert, tuple(data))


class KerasRecipe(NamedTuple):
    """A compiled model, with the functions that make its data."""

    model: Any
    sample_batch: SampleBatch
    training_data: Callable[[], Any] | None = None


class KerasWorkload(Workload):
    """A Keras model that a probe trains.

    `placed_step` is the train step of a model whose layers are on several devices. Raises
    `RequestError` for a setup that Keras doesn't support.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        build_recipe: Callable[[], KerasRecipe],
        placed_step: TrainStep | None = None,
    ) -> None:
        self.setup = setup
        configure(setup)
        self._on_gpus = any(name.startswith("GPU") for name in setup.devices)
        self.memory = (
            AllocatorMemory(setup.devices) if self._on_gpus else MemoryMeter(len(setup.devices))
        )
        self.steps = KerasSteps(setup, placed_step)
        with self.steps.split.scope():
            self.model, self.sample_batch, training_data = build_recipe()
            row = as_arrays(self.sample_batch(1))
            triple = keras.utils.unpack_x_y_sample_weight(row)
            build_model(self.model, triple[0])
            build_variables(self.model, triple)
        self.steps.attach(self.model)
        self.data = None if training_data is None else as_training_data(training_data())
        self._callbacks = keras.callbacks.CallbackList(add_history=True, model=self.model)
        self._source: Any = None
        self._batches: Any = None
        self._position = 0
        self._logs: Any = None
        self._loss = 0.0
        self._held = 0  # bytes allocated before the first step since `prepare`
        self._inputs: dict[StepTimes, float] = {}  # seconds of waiting at the last reading

    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Prepare steps with these shares and passes, and reset the memory meter.

        See `Workload.prepare`. Raises `TooManyElementsError` if a pass on a GPU has too many rows
        for TensorFlow's kernels. Raises `RequestError` if this process would have no rows.
        """
        self._batches = self._source = None
        self.memory.reset()
        self._held = self.memory.used_bytes()
        self.steps.set_shares(shares, micro)
        if self._on_gpus:
            check_rows(self.model, max(self.steps.own_sizes(micro or shares)))
        if self.setup.input == "device":
            batch = as_arrays(self.sample_batch(sum(self.steps.own_sizes(shares))))
            self._batches = repeat(self.steps.send(batch, shares))
        else:
            self.data = self.data or make_pool_data(self.sample_batch)
            self._source = self.data.batches(self.steps.split, sum(shares))
            self._batches = iter(self._source)
        self._position = 0

    def keep_batch(self, keep: bool) -> bool:
        """Reuse the same batch for every step if `keep` is set, else draw new batches again.

        Returns True, because this is always possible.
        """
        if self.setup.input == "device":
            return True
        source = self._source.take(1).cache().repeat() if keep else self._source
        self._batches = iter(source)
        return True

    def step(self) -> None:
        """Train for one step, without waiting for the GPU."""
        if self._position == 0:
            self._held = self.memory.used_bytes()
        if self._position == 1 and self._on_gpus:
            self.memory.reset()  # the first step benchmarked kernels in all free memory
        self._callbacks.on_train_batch_begin(self._position)
        self._logs = self.model.train_function(self._batches)
        self._callbacks.on_train_batch_end(self._position, self._logs)
        self._position += 1

    def synchronize(self) -> None:
        """Wait until all steps are computed, and read the loss."""
        if self.setup.world == 1 and self._on_gpus:
            tf.test.experimental.sync_devices()  # a group's devices include other ranks'
        if self._logs is not None:
            self._loss = float(self._logs["loss"])

    def recover(self) -> bool:
        """Free the memory of a failed step, and return whether training can go on.

        It can't in a group of processes, or if memory remains allocated.
        """
        # The variables of model and optimizer exist before the first step, so no step leaves them
        # incomplete.
        if self.setup.world > 1:
            return False
        self._logs = self._batches = self._source = None
        gc.collect()
        if self._on_gpus:
            tf.test.experimental.sync_devices()
        return self.memory.used_bytes() <= self._held + LEFT_BYTES

    def read_phases(self) -> PhaseSeconds:
        """Return how many seconds steps have waited for input since the previous call.

        The time is None if it is unknown. The time of the optimizer is always None.
        """
        times = self.steps.times
        now, before = times.read_input_s(), self._inputs.get(times, 0.0)
        if now is None or self.setup.input == "device":
            return PhaseSeconds()
        self._inputs[times] = now
        return PhaseSeconds(input_seconds=now - before)

    def loss_is_finite(self) -> bool:
        """Return whether Keras' running mean of the loss was finite at the last synchronization.

        Once a loss isn't finite, the mean isn't either.
        """
        return math.isfinite(self._loss)

    def facts(self) -> Mapping[str, str]:
        """Return facts about the model and the libraries, by name.

        `rows` is the number of rows per epoch, 0 if unknown. `batch_statistics` is the class name
        of a layer that computes statistics of a batch; "" if there is none.
        """
        layers = all_layers(self.model)
        return {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "engine": self.steps.engine,
            "parameters": str(self.model.count_params()),
            "digest": model_digest(self.model),
            "rows": str(self.data.rows if self.data is not None else 0),
            "batch_statistics": next(
                (
                    type(layer).__name__
                    for layer in layers
                    if isinstance(layer, keras.layers.BatchNormalization)
                ),
                "",
            ),
        }


class AllocatorMemory(MemoryMeter):
    """Memory of GPUs, as TensorFlow's allocator reports it."""

    def __init__(self, gpus: Sequence[str]) -> None:
        super().__init__(len(gpus))
        self._gpus = gpus

    def reset(self) -> None:
        """Reset the peak-memory counters."""
        for name in self._gpus:
            tf.config.experimental.reset_memory_stats(name)

    def read(self) -> tuple[int | None, ...]:
        """Return each GPU's peak memory in bytes since the last reset."""
        return tuple(
            int(tf.config.experimental.get_memory_info(name)["peak"]) for name in self._gpus
        )

    def used_bytes(self) -> int:
        """Return the bytes that are allocated now, as a sum over all GPUs."""
        infos = [tf.config.experimental.get_memory_info(name) for name in self._gpus]
        return sum(int(info["current"]) for info in infos)


def configure(setup: WorkerSetup) -> None:
    """Set precision, threads, devices and memory limits of TensorFlow.

    Call it before TensorFlow is first used.
    """
    keras.config.set_dtype_policy(setup.precision)
    fail_at_once()
    if setup.threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(setup.threads)
    cpus = sum(name.startswith("CPU") for name in setup.devices)
    make_logical_cpus(cpus)
    limits = dict(zip(setup.devices, setup.memory_limit_bytes, strict=False))
    for number, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        limit = limits.get(f"GPU:{number}")
        if limit is None:
            tf.config.experimental.set_memory_growth(gpu, True)
        else:
            whole = tf.config.LogicalDeviceConfiguration(memory_limit=max(1, limit >> 20))
            tf.config.set_logical_device_configuration(gpu, [whole])


def fail_at_once() -> None:
    """Make TensorFlow raise an error as soon as GPU memory is exhausted, without retrying.

    Call it before TensorFlow is first used.
    """
    # Only sessions of TensorFlow 1 have a public option. `config` merges its own options into this.
    eager = context.context()
    eager._config = eager._config or tf.compat.v1.ConfigProto()
    eager._config.gpu_options.experimental.disallow_retry_on_allocation_failure = True


MOST_ELEMENTS = 2**31 - 1


class TooManyElementsError(MemoryError):
    """A batch has a tensor with more elements than TensorFlow's GPU kernels can index."""


def largest_rows(model: Any) -> int | None:
    """Return the largest batch whose tensors all have fewer than 2^31 elements; None if unknown."""
    shapes = [tuple(tensor.shape[1:]) for tensor in _tensors(model)]
    largest = max((math.prod(shape) for shape in shapes if None not in shape), default=0)
    return MOST_ELEMENTS // largest if largest else None


def check_rows(model: Any, rows: int) -> None:
    """Raise `TooManyElementsError` if a batch of this many rows would have too large a tensor."""
    most = largest_rows(model)
    if most is not None and rows > most:
        raise TooManyElementsError(
            f"{rows} samples on one GPU: TensorFlow's kernels count 2^31 elements in a "
            f"tensor, {most} samples here."
        )


def _tensors(model: Any) -> list[Any]:
    """Return the output tensors of all layers, including those of nested models."""
    found: list[Any] = []
    for layer in model._flatten_layers(include_self=False):
        for node in layer._inbound_nodes:
            found += node.output_tensors
    return [tensor for tensor in found if tensor.shape is not None]
