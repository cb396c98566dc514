"""Measures what a Keras training step spends its time on: input, computing, or between steps.

The step's graph records when its rows are available. Time between two calls of the train function
counts as callbacks; validation, saving files and evener's own checks are left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import tensorflow as tf
from msgspec.structs import astuple

from ..training.running_sums import RunningSums
from ..training.step_sums import StepSums

KEPT_STEPS = 50  # number of steps from which medians are computed
WARM_STEPS = 3  # number of warm-up steps, which don't count: graphs are traced and kernels chosen
HOST = "CPU:0"

Steps = Callable[[Any], Any]  # Keras' train function, which takes an iterator of batches


class FitStep(NamedTuple):
    """Durations within one training step, in seconds: input, work and the time between calls."""

    input_s: float  # 0 if Keras runs several steps in one call
    work_s: float  # from the arrival of the rows until the call returns
    between_s: float  # between the previous step and this one

    @property
    def whole_s(self) -> float:
        """Total duration of the step, in seconds."""
        return self.input_s + self.work_s + self.between_s


class StepTimes:
    """Measures the training steps of `fit`, except for the first few (warm-up).

    Validation and saving files are measured separately.
    """

    def __init__(self) -> None:
        self.sums = RunningSums()
        self.kept: deque[FitStep] = deque(maxlen=KEPT_STEPS)
        with tf.device(HOST):
            # when the rows of the last step were available (Unix time)
            self._ready = tf.Variable(tf.zeros([], tf.float64), trainable=False)
        self._notes = False  # True if a step's graph records when its rows are available
        self._left_out = WARM_STEPS  # number of remaining warm-up steps
        self._called_s = self._ended_s = 0.0  # Unix times of the last step's call and end
        self._separate: dict[
            str, float
        ] = {}  # seconds spent since the last step's end, by activity

    def record_arrival(self, data: Any) -> None:
        """Make the step's graph record when the batch's rows are available."""
        self._notes = True
        every = tf.nest.flatten(data, expand_composites=True)
        leaves = [leaf for leaf in every if leaf is not None]
        with tf.device(HOST), tf.control_dependencies(leaves[:1]):
            self._ready.assign(tf.timestamp())

    def begin(self) -> None:
        """Start measuring a new call of `fit`, which begins with warm-up steps."""
        self._left_out = WARM_STEPS
        self._ended_s = 0.0

    def wrap_call(self, run: Steps) -> Steps:
        """Wrap the train function, to record when Keras calls it.

        The time is recorded before evener's own checks, so these don't count as callbacks.
        """

        def run_called(batches: Any) -> Any:
            self._called_s = time.time()
            return run(batches)

        return run_called

    def wrap_steps(self, run: Steps, steps: Callable[[], int]) -> Steps:
        """Wrap the train function, to measure its steps.

        `steps` returns how many steps the function runs per call.
        """

        def run_timed(batches: Any) -> Any:
            began_s = time.time()
            logs = run(batches)
            self._note(began_s, time.time(), steps())
            return logs

        return run_timed

    @contextmanager
    def time_separately(self, name: str) -> Iterator[None]:
        """Context manager whose duration counts as `name` instead of as part of a step.

        `name` is "validation" or "files".
        """
        began_s = time.time()
        try:
            yield
        finally:
            self._separate[name] = self._separate.get(name, 0.0) + time.time() - began_s

    def _note(self, began_s: float, ended_s: float, steps: int) -> None:
        before_s, self._ended_s = self._ended_s, ended_s
        separate, self._separate = self._separate, {}
        if not before_s:
            return
        if self._left_out:
            self._left_out -= 1
            return
        ready_s = float(self._ready.numpy()) if steps == 1 else 0.0
        input_s = min(max(0.0, ready_s - began_s), ended_s - began_s)
        work_s = ended_s - began_s - input_s
        validation_s, files_s = separate.get("validation", 0.0), separate.get("files", 0.0)
        between_s = max(0.0, self._called_s - before_s - validation_s - files_s)
        self.kept.append(FitStep(input_s / steps, work_s / steps, between_s / steps))
        step = StepSums(
            steps=steps,
            input_s=input_s,
            undivided_s=work_s,
            files_s=files_s,
            validation_s=validation_s,
            between_s=between_s,
        )
        whole_s = input_s + work_s + between_s + validation_s + files_s
        self.sums.add(astuple(step), whole_s)

    def read_input_s(self) -> float | None:
        """Return the total time that steps have waited for input, in seconds; None if unknown."""
        # it is unknown with passes in engine multiworker
        return self.sums.whole.input_s if self._notes else None

    def medians(self) -> FitStep:
        """Return the median seconds of each activity in the latest steps.

        Before the first step, all are 0.
        """
        if not self.kept:
            return FitStep(0.0, 0.0, 0.0)
        return FitStep(*(median(each) for each in zip(*self.kept, strict=True)))
