"""What an engine is: a way to train a Keras model on devices, behind Keras' own `fit`.

`Solo` is Keras' own on one device, `Towers` one process with several devices, `Workers` one process
of a group. `FitHooks` asks an engine for its steps, for data in its form and for what comes around
them, and knows no engine by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tensorflow as tf

from ..live.reporter import DeviceTimes
from ..shares.divisions import Cut
from .compatibility import PartKinds, check_compiled
from .data import ArrayBatches
from .keras_step import Tensors

Steps = Callable[[Any], Any]  # Keras' function of some steps, given an iterator of batches


class Engine(Protocol):
    """A way to train, evaluate and predict with one model."""

    name: str
    model: Any
    cut: Cut
    kinds: defaultdict[bool, PartKinds]  # of training, of evaluation
    device: str  # that this process computes losses on
    group: Any  # of processes; None in one process
    splits: bool  # the engine's steps take the place of Keras'

    def scope(self) -> AbstractContextManager[Any]:
        """Where Keras' own steps run as they are."""

    def check_model(self) -> None:
        """Refuse a model that the engine can't train, at the begin of `fit`."""

    def check_step(self) -> None:
        """Refuse what can't be trained as it is compiled, before a train function is made."""

    def check_test_step(self) -> None:
        """Refuse what can't be evaluated."""

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Train on a batch; the figures of the whole batch."""

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Evaluate a batch; the figures of the whole batch."""

    def predict_step(self, data: Tensors) -> Tensors:
        """The outputs for a batch."""

    def judges_parts(self, training: bool) -> bool:
        """True if losses are computed of parts of a batch."""

    def around_training(self, run: Steps) -> Steps:
        """Keras' function that trains some steps, with what the engine does around them."""

    def around_tests(self, run: Steps) -> Steps:
        """Keras' function that evaluates some batches, with what the engine does around them."""

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods of the model besides its steps that are another one's by this engine."""

    def build(self, x: Any) -> None:
        """Make the weights by the first rows of x, where they are needed before the first step."""

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """A dataset of arrays in the form that the steps take."""

    def draw_seed(self) -> int:
        """The seed of the order of epochs, by `keras.utils.set_random_seed`."""

    def begin_fit(self, callbacks: Any) -> Any:
        """A `fit` begins; its callbacks, which may restore weights, save, and end it."""

    def share_weights(self) -> None:
        """Give all processes the same weights and optimizer."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """The times of each device in the last steps; none where they can't be told apart."""


class OneProcess:
    """What engines of one process have in common: Keras' data, files and callbacks are as ever."""

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
        """Where Keras' own steps run as they are: the first device."""
        scope: AbstractContextManager[Any] = tf.device(self.device)
        return scope

    def check_test_step(self) -> None:
        """Refuse nothing: a `test_step` of the user's own runs whole."""

    def judges_parts(self, training: bool) -> bool:
        """True if losses are computed of parts of a batch."""
        return training and self.cut.in_passes

    def around_training(self, run: Steps) -> Steps:
        """Keras' function as it is."""
        return run

    def around_tests(self, run: Steps) -> Steps:
        """Keras' function as it is."""
        return run

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Nothing."""
        return {}

    def build(self, x: Any) -> None:
        """Do nothing: the first batch makes the weights."""

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Global batches."""
        return arrays.global_batches(endless)

    def draw_seed(self) -> int:
        """The seed of the order of epochs."""
        return draw_number()

    def begin_fit(self, callbacks: Any) -> Any:
        """The callbacks as they are."""
        return callbacks

    def share_weights(self) -> None:
        """Do nothing."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """None: the devices of one graph wait for each other within it."""
        return ()


class Solo(OneProcess):
    """Keras' own steps on one device."""

    name = "solo"
    splits = False

    def check_model(self) -> None:
        """Refuse a model without a loss."""
        check_compiled(self.model)

    def check_step(self) -> None:
        """Refuse a model without a loss."""
        check_compiled(self.model)

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """The model's own step."""
        logs: dict[str, Any] = self._whole("train_step", data)
        return logs

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """The model's own step."""
        logs: dict[str, Any] = self._whole("test_step", data)
        return logs

    def predict_step(self, data: Tensors) -> Tensors:
        """The model's own step."""
        return self._whole("predict_step", data)

    def _whole(self, name: str, data: Tensors) -> Any:
        with self.scope():
            return getattr(type(self.model), name)(self.model, data)


def draw_number() -> int:
    """A random number by `keras.utils.set_random_seed`."""
    with tf.device("CPU:0"):
        return int(tf.random.uniform([], maxval=1 << 31, dtype=tf.int64))
