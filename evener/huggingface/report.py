"""Reports a Trainer's speed to its trackers, such as TensorBoard, and to evener's monitor."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..live.metrics import PREFIX, metrics
from ..live.step_clock import ClockedReports


def report(trainer: Trainer) -> None:
    """Report a trainer's speed to evener's monitor and to the trainer's trackers.

    Call it once, before `train`. The trackers, as listed in `report_to`, get these metrics, which
    aren't printed to the console:

    - without a plan: samples/s, the step time, and the wait for data.
    - with a plan or `evener run`: samples/s, shares, compute time and waiting time. The monitor
      then gets the steps even without this call.
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
    """Times the steps of a Trainer without a plan, and adds metrics to the log."""

    # This has to be the first callback, so that the trackers' callbacks receive the metrics.

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._clock: ClockedReports | None = None  # set if nothing else reports the steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start reporting, unless the Trainer has a plan and reports its steps itself."""
        if not hasattr(self._trainer, "_planned"):
            name = type(self._trainer.model).__name__
            self._clock = ClockedReports("torch", name, args.process_index, args.world_size)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start timing an optimizer step."""
        if self._clock is not None:
            self._clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the row count and the duration of a finished optimizer step."""
        if self._clock is not None:
            rows = args.train_batch_size * args.gradient_accumulation_steps
            index = args.device.index
            self._clock.end(rows, () if index is None else (index,))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop timing until the next step, so that an evaluation doesn't count as step time."""
        if self._clock is not None:
            self._clock.interrupt()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """In the first process, add evener's metrics to log entries that contain a loss."""
        if state.is_world_process_zero and logs is not None and "loss" in logs:
            logs.update(metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Send the last report, and stop reporting."""
        if self._clock is not None:
            self._clock.close()


class _SpeedMetricsFilter(TrainerCallback):  # type: ignore[misc]
    """Removes evener's metrics from log entries before they are printed."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Remove evener's metrics from a log entry before it is printed."""
        for name in [name for name in logs or () if name.startswith(PREFIX)]:
            del logs[name]
