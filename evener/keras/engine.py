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
    """A way to train, evaluate and predict with one model."""

    name: str
    model: Any
    cut: Cut
    kinds: defaultdict[bool, PartKinds]  # [True] for training, [False] for evaluation
    device: str  # the device on which this process computes losses
    group: Any  # the group of processes; None in one process
    splits: bool  # True if the engine's steps replace Keras'

    def scope(self) -> AbstractContextManager[Any]:
        """Return the scope for Keras' own steps, on the device of the weights."""

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Make an error in a `with` block fail the whole group."""

    def check_model(self) -> None:
        """Raise RequestError at the start of `fit` if the engine can't train this model."""

    def check_step(self) -> None:
        """Raise RequestError if the engine can't train the model as it is compiled.

        It is called after the model is compiled, before a train function is made.
        """

    def check_test_step(self) -> None:
        """Raise RequestError if the model can't be evaluated."""

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Train on a batch; return the logs of the whole batch."""

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Evaluate a batch; return the logs of the whole batch."""

    def predict_step(self, data: Tensors) -> Tensors:
        """Return the model's outputs for a batch."""

    def judges_parts(self, training: bool) -> bool:
        """True if a separate loss is computed for each part of a batch."""

    def around_training(self, run: Steps) -> Steps:
        """Return a function that calls Keras' train function `run`.

        The engine may add checks, and replace `run` by a function of its own.
        """

    def around_tests(self, run: Steps) -> Steps:
        """Return a function that calls Keras' test function `run`.

        The engine may run one batch at a time.
        """

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return replacements for methods of the model other than its steps, by name."""

    def build(self, x: Any) -> None:
        """Create the model's weights if the engine needs them before the first batch.

        `x` is the data of a `fit`.
        """

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Return a dataset of the arrays in the form that the engine's steps accept.

        An `endless` dataset repeats its epochs without a pause.
        """

    def draw_seed(self) -> int:
        """Return a random seed for shuffling; `keras.utils.set_random_seed` determines it."""

    def begin_fit(self, callbacks: Any) -> Any:
        """Prepare for a `fit`, and return the callbacks to use.

        `callbacks` is the argument of `fit`. Callbacks that restore, save or stop may be adapted.
        """

    def share_weights(self) -> None:
        """Give all processes the same weights and optimizer state."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """Return each device's compute time (own work) and waiting time in recent steps.

        The devices are in the order of the shares. The result is empty if the times are unknown.
        """


class OneProcess:
    """The base class of engines with one process.

    Such engines leave data, files and callbacks to Keras.
    """

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
        """Return the scope of the first device, in which Keras' own steps run unchanged."""
        scope: AbstractContextManager[Any] = tf.device(self.device)
        return scope

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return an empty context, because there is only one process."""
        return nullcontext()

    def check_test_step(self) -> None:
        """Accept every model: a `test_step` that the user overrides runs on the whole batch."""

    def judges_parts(self, training: bool) -> bool:
        """True in training with passes, each of which has a separate loss."""
        return training and self.cut.in_passes

    def around_training(self, run: Steps) -> Steps:
        """Return Keras' function unchanged."""
        return run

    def around_tests(self, run: Steps) -> Steps:
        """Return Keras' function unchanged."""
        return run

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return an empty dictionary: no method of the model has to be replaced."""
        return {}

    def build(self, x: Any) -> None:
        """Do nothing: the first batch creates the weights."""

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Return a dataset of global batches."""
        return arrays.global_batches(endless)

    def draw_seed(self) -> int:
        """Draw a seed for shuffling the epochs."""
        return draw_number()

    def begin_fit(self, callbacks: Any) -> Any:
        """Return the callbacks unchanged."""
        return callbacks

    def share_weights(self) -> None:
        """Do nothing: there is only one process."""

    def device_times(self) -> Sequence[DeviceTimes]:
        """Return an empty tuple: the times are unknown."""
        # a single graph doesn't show when each device computes or waits
        return ()


class Solo(OneProcess):
    """The engine that runs Keras' own steps on one device."""

    name = "solo"
    splits = False

    def check_model(self) -> None:
        """Raise RequestError if the model isn't compiled."""
        check_compiled(self.model)

    def check_step(self) -> None:
        """Raise RequestError if the model isn't compiled."""
        check_compiled(self.model)

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Run the model's own step."""
        logs: dict[str, Any] = self._whole("train_step", data)
        return logs

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Run the model's own step."""
        logs: dict[str, Any] = self._whole("test_step", data)
        return logs

    def predict_step(self, data: Tensors) -> Tensors:
        """Run the model's own step."""
        return self._whole("predict_step", data)

    def _whole(self, name: str, data: Tensors) -> Any:
        with self.scope():
            return getattr(type(self.model), name)(self.model, data)


def draw_number() -> int:
    """Return a random number below 2^31; `keras.utils.set_random_seed` makes it reproducible."""
    with tf.device("CPU:0"):
        return int(tf.random.uniform([], maxval=1 << 31, dtype=tf.int64))
