"""A Keras model and what it trains on as a workload, stepped as `fit` steps the user's training.

One trace serves every batch size, as Keras' own fit relaxes shapes too. Batches come from host memory each step, by
the pipeline and the train function of the training, unless the place says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import keras
import tensorflow as tf

from evener.keras_split.compatibility import all_layers, model_digest
from evener.keras_split.measuring import build_variables
from evener.keras_split.tf_devices import make_logical_cpus

from ..memory import GpuMemory, MemoryMeter
from ..protocol import Place
from .batches import Rows, SampleBatch, Stream, as_arrays, pool
from .step_engines import SingleDeviceEngine, choose_engine

BuildModel = Callable[[], Any]  # a compiled keras.Model


class KerasWorkload:
    """A compiled model at its place, stepped by one of `step_engines` or by an engine of its own.

    RequestError for a place that Keras can't serve.
    """

    def __init__(
        self, place: Place, build_model: BuildModel, sample_batch: SampleBatch, engine: SingleDeviceEngine | None = None
    ) -> None:
        self.place = place
        self.sample_batch = sample_batch
        self.data: Rows | Stream | None = None  # None: a pool of what `sample_batch` makes
        configure(place)
        self._on_gpus = any(name.startswith("GPU") for name in place.devices)
        self._memory = MemoryMeter(len(place.devices), gpu_memory(place.devices) if self._on_gpus else None)
        self.engine = engine or choose_engine(place)
        with self.engine.scope():
            self.model = build_model()
            if not self.model.built:
                self.model(as_arrays(sample_batch(1))[0])
            build_variables(self.model, keras.utils.unpack_x_y_sample_weight(as_arrays(sample_batch(1))))
        self.engine.attach(self.model, as_arrays(sample_batch(2)))
        self._callbacks = keras.callbacks.CallbackList(add_history=True, model=self.model)
        self._sent: Any = None  # a batch in the devices' memory
        self._batches: Any = None
        self._position = 0
        self._logs: Any = None
        self._loss = 0.0

    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Begin to make batches for these shares; RequestError if this process would have none of the samples."""
        self._memory.reset()
        self._sent = self._batches = None
        spans = self.engine.spans(tuple(shares), tuple(micro))
        if self._on_gpus:
            own = micro[self.place.rank : self.place.rank + 1] if self.place.world > 1 else micro
            check_rows(self.model, max(own or (stop - start for start, stop in spans)))
        if self.place.input == "device":
            self._sent = self.engine.send(self.engine.cut(as_arrays(self.sample_batch(spans[-1][1])), spans))
        else:
            self.data = self.data or pool(self.sample_batch)
            self._batches = iter(self.data.batches(self.engine.split, sum(shares)))
        self._position = 0

    def step(self) -> None:
        """Take an optimizer step on the next batch, with what `fit` does around it."""
        if self._position == 1 and self._on_gpus:
            self._memory.reset()  # the first step tried kernels out, which takes what is free
        if self._sent is not None:
            self._logs = self.engine.step(self._sent)
            self._position += 1
            return
        self._callbacks.on_train_batch_begin(self._position)
        self._logs = self.model.train_function(self._batches)
        self._callbacks.on_train_batch_end(self._position, self._logs)
        self._position += 1

    def synchronize(self) -> None:
        """Wait for the devices, then fetch the loss."""
        if self.place.world == 1 and self._on_gpus:
            tf.test.experimental.sync_devices()  # in a group it would ask the others, out of reach
        if self._logs is not None:
            self._loss = float(self._logs["loss"])

    def loss_is_finite(self) -> bool:
        """Keras' mean loss since the start: not finite once one was not."""
        return math.isfinite(self._loss)

    def max_memory_bytes(self) -> tuple[int | None, ...]:
        """Peak of TensorFlow's allocator on GPUs; on a CPU the growth of the process since before the model."""
        return self._memory.read()

    def release_memory(self) -> tuple[int | None, ...]:
        """TensorFlow's allocator keeps what it has."""
        return self._memory.release()

    def facts(self) -> Mapping[str, str]:
        """Versions, engine, parameters, digest, and what is known of the rows."""
        layers = all_layers(self.model)
        return {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "engine": self.engine.name,
            "parameters": str(self.model.count_params()),
            "digest": model_digest(self.model),
            "rows": str(self.data.count if self.data is not None else 0),
            "batch_statistics": next(
                (type(each).__name__ for each in layers if isinstance(each, keras.layers.BatchNormalization)), ""
            ),
        }


def gpu_memory(devices: Sequence[str]) -> GpuMemory:
    """TensorFlow's allocator on GPUs that it calls GPU:0, ..."""

    def reset() -> None:
        for name in devices:
            tf.config.experimental.reset_memory_stats(name)

    def read() -> tuple[int, ...]:
        return tuple(int(tf.config.experimental.get_memory_info(name)["peak"]) for name in devices)

    return GpuMemory(reset, read)


def configure(place: Place) -> None:
    """Precision, threads, and each GPU's memory; before TensorFlow's first operation."""
    keras.config.set_dtype_policy(place.precision)
    if place.threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(place.threads)
    cpus = sum(name.startswith("CPU") for name in place.devices)
    make_logical_cpus(cpus)
    limits = dict(zip(place.devices, place.memory_limit_bytes, strict=False))
    for number, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        limit = limits.get(f"GPU:{number}")
        if limit is None:
            tf.config.experimental.set_memory_growth(gpu, True)
        else:
            whole = tf.config.LogicalDeviceConfiguration(memory_limit=max(1, limit >> 20))
            tf.config.set_logical_device_configuration(gpu, [whole])


MOST_ELEMENTS = 2**31 - 1


class TooManyElementsError(MemoryError):
    """A batch whose tensors TensorFlow's GPU kernels can't count: a limit on the batch, as memory is."""


def largest_rows(model: Any) -> int | None:
    """Rows at which the largest input or output of a layer reaches the limit; None where no shape is known."""
    sizes = [prod(shape) for tensor in _tensors(model) if None not in (shape := tuple(tensor.shape[1:]))]
    return MOST_ELEMENTS // max(sizes) if sizes and max(sizes) else None


def check_rows(model: Any, rows: int) -> None:
    """TooManyElementsError for more rows on one GPU than TensorFlow's kernels count."""
    most = largest_rows(model)
    if most is not None and rows > most:
        raise TooManyElementsError(
            f"{rows} samples on one GPU: TensorFlow's kernels count 2^31 elements in a tensor, {most} samples here."
        )


def _tensors(model: Any) -> list[Any]:
    """The outputs of each layer, also of models within; a layer that was never called has none."""
    found: list[Any] = []
    for layer in model._flatten_layers(include_self=False):
        for node in layer._inbound_nodes:
            found += node.output_tensors
    return [tensor for tensor in found if tensor.shape is not None]
