"""A Keras model and a maker of batches as a workload, stepped by the very engines that the user's training runs.

One trace serves every batch size, as Keras' own fit relaxes shapes too. Batches come from host memory each step unless
the place says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evener.keras_split.devices import make_logical_cpus
from evener.keras_split.digest import model_digest
from workloads.base import Place
from workloads.keras_limits import check_rows
from workloads.keras_memory import PeakMemory
from workloads.keras_ways import Solo as Solo
from workloads.keras_ways import choose_way, rows_of

BuildModel = Callable[[], Any]  # a compiled keras.Model
SampleBatch = Callable[[int], tuple[Any, Any]]  # n -> (x, y), n rows each
SPARE_ROWS = 4096  # at most so many more rows than a batch are held on the host


class KerasWorkload:
    """A compiled model at its place, by one of `keras_ways`, or by the `way` of a workload that lays its own parts.

    RequestError for a place that Keras can't serve.
    """

    def __init__(
        self, place: Place, build_model: BuildModel, sample_batch: SampleBatch, way: Solo | None = None
    ) -> None:
        self.place = place
        self.sample_batch = sample_batch
        configure(place)
        self._memory = PeakMemory(place.devices)
        self.way = way or choose_way(place)
        with self.way.scope():
            self.model = build_model()
            if not self.model.built:
                self.model(as_arrays(sample_batch(1))[0])
            self.model.optimizer.build(self.model.trainable_variables)
        self.way.attach(self.model, as_arrays(sample_batch(2)))
        self._batches: list[Any] = []
        self._position = 0
        self._logs: Any = None

    def prepare(self, shares: Sequence[int]) -> None:
        """Hold batches for these shares; RequestError if this process would have none of the samples."""
        self._memory.reset()
        self._batches = []
        spans = self.way.spans(tuple(shares))
        if any(name.startswith("GPU") for name in self.place.devices):
            check_rows(self.model, max(stop - start for start, stop in spans))
        rows = spans[-1][1]
        spare = min(rows, SPARE_ROWS)
        x, y = as_arrays(self.sample_batch(rows + spare))
        starts = [0] if self.place.input == "device" else sorted({0, spare // 4, spare // 2, spare})
        for start in starts:
            pool = rows_of((x, y), start, start + rows)
            self._batches.append(self.way.cut(pool, spans))
        if self.place.input == "device":
            self._batches = [self.way.send(batch) for batch in self._batches]
        self._position = 0

    def step(self) -> None:
        """One optimizer step on the next batch."""
        batch = self._batches[self._position % len(self._batches)]
        self._position += 1
        self._logs = self.way.step(batch if self.place.input == "device" else self.way.load(batch))

    def synchronize(self) -> None:
        """Wait for the devices, then fetch the loss."""
        if self.place.world == 1 and any(name.startswith("GPU") for name in self.place.devices):
            tf.test.experimental.sync_devices()  # in a group it would ask the others, out of reach
        if self._logs is not None:
            float(self._logs["loss"])

    def peak_memory_bytes(self) -> tuple[int | None, ...]:
        """Peak of TensorFlow's allocator on GPUs; on a CPU the growth of the process since before the model."""
        return self._memory.read()

    def facts(self) -> Mapping[str, str]:
        """Versions, parameters, digest, and how it was run."""
        return {
            "framework": "tensorflow",
            "version": tf.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "engine": self.way.name,
            "parameters": str(self.model.count_params()),
            "digest": model_digest(self.model),
            "precision": self.model.dtype_policy.name,
            "xla": str(self.place.xla).lower(),
            "input": self.place.input,
            "trace": "one for all batch sizes",
            "memory": self._memory.meaning,
        }


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


def as_arrays(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """The batch as numpy arrays, floats in Keras' float type, as fit converts them."""

    def convert(each: Any) -> Any:
        array = np.asarray(each)
        return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array

    converted: tuple[Any, Any] = keras.tree.map_structure(convert, tuple(batch))
    return converted
