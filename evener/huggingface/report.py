"""Report a trainer's speed to evener's monitor and to the trainer's trackers.

This works with and without a plan.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..live.metrics import PREFIX, metrics
from ..live.step_clock import ClockedReports


def report(trainer: Trainer) -> None:
    """Report a trainer's speed to evener's monitor and to its trackers.

    Call this function once, before `train`. It changes nothing else about the training. The
    trackers are those that the trainer's argument `report_to` lists.

    The metrics are samples/s, the step time and the wait for data. With a plan or `evener run`,
    they are compute time (own work), waiting time, shares and samples/s instead. The monitor then
    gets the steps even without this call.
    """
    callbacks = trainer.callback_handler.callbacks
    console = next(
        (
            place
            for place, callback in enumerate(callbacks)
            if isinstance(callback, PrinterCallback | ProgressCallback)
        ),
        len(callbacks),
    )
    callbacks.insert(console, _SpeedMetricsFilter())
    callbacks.insert(0, _ReportCallback(trainer))


class _ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no complete types
    """Adds speed metrics to each log entry of the training loss."""

    # This has to be the first callback, so that the trackers' callbacks receive the metrics.

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._clock: ClockedReports | None = None  # set if nothing else reports the steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start a step clock, unless a plan already reports the trainer's steps."""
        if not hasattr(self._trainer, "_planned"):
            name = type(self._trainer.model).__name__
            self._clock = ClockedReports("torch", name, args.process_index, args.world_size)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start timing an optimizer step; its first batch has already been loaded."""
        if self._clock is not None:
            self._clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report an optimizer step, with the rows of a full step."""
        if self._clock is not None:
            rows = args.train_batch_size * args.gradient_accumulation_steps
            index = args.device.index
            self._clock.end(rows, () if index is None else (index,))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Interrupt the step clock after an evaluation."""
        # Otherwise, the evaluation's time would count as a slow step.
        if self._clock is not None:
            self._clock.interrupt()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add speed metrics to a log entry with the training loss."""
        if state.is_world_process_zero and logs is not None and "loss" in logs:
            logs.update(metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove this training from the monitor."""
        if self._clock is not None:
            self._clock.close()


class _SpeedMetricsFilter(TrainerCallback):  # type: ignore[misc]
    """Removes the speed metrics from a log entry."""

    # Another callback then prints the entry without them.

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Remove the speed metrics, so that the printed log stays unchanged."""
        for name in [name for name in logs or () if name.startswith(PREFIX)]:
            del logs[name]
