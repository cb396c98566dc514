"""The interface of an engine, which is a way to train a Keras model.

- `Solo` trains on one device as Keras itself does.
- `Towers` trains on several devices in one process.
- `Workers` trains on one device in each of several processes.

`FitHooks` makes Keras' own `fit` use an engine. The engine provides the steps, decides what form of
data it needs, and wraps Keras' train and test functions.
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
    """Interface of an object that trains and evaluates a Keras model on some devices.

    These are one device, several devices in one process, or one device in each of several
    processes.
    """

    name: str
    model: Any
    cut: Cut
    kinds: defaultdict[bool, PartKinds]  # [True] for training, [False] for evaluation
    device: str  # the device on which this process computes losses
    group: Any  # the group of processes; None in one process
    splits: bool  # True if the engine's steps replace Keras'

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context manager in which the user's model has to be created."""

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return a context manager that reports an exception to the other processes."""

    def check_model(self) -> None:
        """Raise RequestError if this engine can't train the model."""

    def check_step(self) -> None:
        """Raise RequestError if this engine can't run the model's training step."""

    def check_test_step(self) -> None:
        """Raise RequestError if this engine can't run the model's test step."""

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Train on a batch, in place of Keras' `train_step`, and return the logs."""

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Evaluate a batch, in place of Keras' `test_step`, and return the logs."""

    def predict_step(self, data: Tensors) -> Tensors:
        """Compute the outputs of a batch, in place of Keras' `predict_step`, and return them."""

    def has_loss_per_part(self, training: bool) -> bool:
        """Return whether losses are computed for parts of a batch instead of for the whole batch.

        `training` is False for an evaluation.
        """

    def wrap_training(self, run: Steps) -> Steps:
        """Wrap Keras' train function, so that the engine can act before and after its steps."""

    def wrap_tests(self, run: Steps) -> Steps:
        """Wrap Keras' test function, so that the engine can act before and after its steps."""

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return functions that replace methods of the model, by the methods' names."""

    def build(self, x: Any) -> None:
        """Create the model's weights for inputs like `x`."""

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Return a dataset of the global batches.

        With several processes, it may have only this process's rows of each batch. The dataset
        never ends if it is `endless`, and otherwise ends after one epoch.
        """

    def draw_seed(self) -> int:
        """Draw a random seed, which is the same in all processes."""

    def begin_fit(self, callbacks: Any) -> Any:
        """Return the callbacks that `fit` uses in this process, given the user's callbacks."""

    def share_weights(self) -> None:
        """Copy the first process's weights to the other processes."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """Return how long each device computed and waited in the latest steps, or () if unknown.

        The devices are in the order of the shares.
        """


class OneProcess:
    """Base class of the engines that use a single process."""

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
        """Return a context manager that places new variables on the first device."""
        scope: AbstractContextManager[Any] = tf.device(self.device)
        return scope

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing, as there are no other processes."""
        return nullcontext()

    def check_test_step(self) -> None:
        """Do nothing, because a single process can run any test step."""

    def has_loss_per_part(self, training: bool) -> bool:
        """Return whether each part of a batch has its own loss, as in gradient accumulation."""
        return training and self.cut.in_passes

    def wrap_training(self, run: Steps) -> Steps:
        """Return `run` unchanged."""
        return run

    def wrap_tests(self, run: Steps) -> Steps:
        """Return `run` unchanged."""
        return run

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return an empty dict, because no method of the model is replaced."""
        return {}

    def build(self, x: Any) -> None:
        """Do nothing, because Keras builds the model itself."""

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Return a dataset of global batches."""
        return arrays.global_batches(endless)

    def draw_seed(self) -> int:
        """Draw a random seed."""
        return draw_number()

    def begin_fit(self, callbacks: Any) -> Any:
        """Return the callbacks unchanged."""
        return callbacks

    def share_weights(self) -> None:
        """Do nothing, because there are no other processes."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """Return (), because the time of each device is unknown: all of them run one graph."""
        return ()


class Solo(OneProcess):
    """Engine for a single device, which runs Keras' own steps."""

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
