"""The interface of an engine, a way to train a Keras model.

- `Solo` trains on one device as Keras itself does.
- `Towers` trains on several devices in one process.
- `Workers` trains on one device in each of several processes.

`FitHooks` puts an engine behind Keras' own `fit`. It gets three things from the engine: the steps,
the form of the data and the wrappers of Keras' functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import tensorflow as tf

from ..live.reporter import DeviceTimes
from ..shares.divisions import Cut
from .compatibility import check_compiled
from .data import ArrayBatches
from .keras_step import Tensors
from .part_kinds import PartKinds

Steps = Callable[[Any], Any]  # Keras' train or test function, called with an iterator of batches


class Engine(Protocol):
    """Runs the steps of a Keras model: on one device, on several, or in several processes."""

    name: str
    model: Any
    cut: Cut
    kinds: defaultdict[bool, PartKinds]  # [True] for training, [False] for evaluation
    device: str  # the device on which this process computes losses
    group: Any  # the group of processes; None in one process
    splits: bool  # True if the engine's steps replace Keras'

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context manager in which variables are created."""

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return a context manager that reports an error to the other processes."""

    def check_model(self) -> None:
        """Raise RequestError if this engine can't train the model."""

    def check_step(self) -> None:
        """Raise RequestError if this engine can't run the model's training step."""

    def check_test_step(self) -> None:
        """Raise RequestError if this engine can't run the model's test step."""

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Train on a batch and return the logs."""

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Evaluate a batch and return the logs."""

    def predict_step(self, data: Tensors) -> Tensors:
        """Return the outputs of a batch."""

    def judges_parts(self, training: bool) -> bool:
        """Return whether the loss is computed on parts of a batch instead of the whole."""

    def around_training(self, run: Steps) -> Steps:
        """Wrap Keras' train function."""

    def around_tests(self, run: Steps) -> Steps:
        """Wrap Keras' test function."""

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return methods to replace on the model, by name."""

    def build(self, x: Any) -> None:
        """Build the model for inputs `x`."""

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Return a dataset of the batches, or of this process's rows of them."""

    def draw_seed(self) -> int:
        """Draw a random seed, the same in all processes."""

    def begin_fit(self, callbacks: Any) -> Any:
        """Return the callbacks to use in `fit`."""

    def share_weights(self) -> None:
        """Copy the first process's weights to the others."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """Return each device's times in the latest steps, or () if unknown."""


class OneProcess:
    """Base class of engines that use one process."""

    name = ""
    splits = True
    group = None

    def __init__(self, model: Any, devices: Sequence[str], cut: Cut) -> None:
        self.model = model
        self.devices = tuple(devices)
        self.device = self.devices[0]
        self.cut = cut
        self.kinds: defaultdict[bool, PartKinds] = defaultdict(PartKinds)

    def scope(self) -> AbstractContextManager[Any]:
        """Return the scope of the first device."""
        scope: AbstractContextManager[Any] = tf.device(self.device)
        return scope

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def check_test_step(self) -> None:
        """Do nothing: every test step can run."""

    def judges_parts(self, training: bool) -> bool:
        """Return whether a training step is divided into passes."""
        return training and self.cut.in_passes

    def around_training(self, run: Steps) -> Steps:
        """Return `run` unchanged."""
        return run

    def around_tests(self, run: Steps) -> Steps:
        """Return `run` unchanged."""
        return run

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return {}: nothing on the model is replaced."""
        return {}

    def build(self, x: Any) -> None:
        """Do nothing: Keras builds the model itself."""

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Return a dataset of whole batches."""
        return arrays.global_batches(endless)

    def draw_seed(self) -> int:
        """Draw a random seed."""
        return draw_number()

    def begin_fit(self, callbacks: Any) -> Any:
        """Return the callbacks unchanged."""
        return callbacks

    def share_weights(self) -> None:
        """Do nothing: there are no other processes."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """Return ()."""
        # a single graph doesn't show when each device computes or waits
        return ()


class Solo(OneProcess):
    """Engine for one device, which runs Keras' own steps."""

    name = "solo"
    splits = False

    def check_model(self) -> None:
        """Raise RequestError if the model isn't compiled."""
        check_compiled(self.model)

    def check_step(self) -> None:
        """Raise RequestError if the model isn't compiled."""
        check_compiled(self.model)

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Run the model's own train step."""
        logs: dict[str, Any] = self._whole("train_step", data)
        return logs

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Run the model's own test step."""
        logs: dict[str, Any] = self._whole("test_step", data)
        return logs

    def predict_step(self, data: Tensors) -> Tensors:
        """Run the model's own predict step."""
        return self._whole("predict_step", data)

    def _whole(self, name: str, data: Tensors) -> Any:
        with self.scope():
            return getattr(type(self.model), name)(self.model, data)


def draw_number() -> int:
    """Draw a random number below 2**31 from TensorFlow's generator."""
    with tf.device("CPU:0"):
        return int(tf.random.uniform([], maxval=1 << 31, dtype=tf.int64))
