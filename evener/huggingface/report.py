"""A trainer's speed to the monitor, and its figures to the trackers that it logs to, with a plan or
without.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..live.figures import PREFIX, figures
from ..live.step_clock import ClockedReports


def report(trainer: Trainer) -> None:
    """Report a trainer's steps to the monitor, and own work, waiting, shares and samples/s to
    whatever `report_to` names.

    Call it once, before `train`. Under a plan or `evener run` the steps are reported anyway;
    without, the figures are samples/s, the time of a step, and the wait for data. Nothing else
    changes.
    """
    callbacks = trainer.callback_handler.callbacks
    console = next(
        (
            place
            for place, each in enumerate(callbacks)
            if isinstance(each, PrinterCallback | ProgressCallback)
        ),
        len(callbacks),
    )
    callbacks.insert(console, _OffTheConsole())
    callbacks.insert(0, _Figures(trainer))


class _Figures(TrainerCallback):  # type: ignore[misc]  # transformers has no complete types
    """The first callback: what it adds to a log, all trackers get."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._clock: ClockedReports | None = None  # where nothing else reports the steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A plan reports the steps of its trainers."""
        if not hasattr(self._trainer, "_planned"):
            name = type(self._trainer.model).__name__
            self._clock = ClockedReports("torch", name, args.process_index, args.world_size)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first batch of an optimizer step is there."""
        if self._clock is not None:
            self._clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step is done; the last one of an epoch may have had fewer rows."""
        if self._clock is not None:
            rows = args.train_batch_size * args.gradient_accumulation_steps
            index = args.device.index
            self._clock.end(rows, () if index is None else (index,))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step after an evaluation isn't a slow one."""
        if self._clock is not None:
            self._clock.interrupt()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the figures to what was logged of the training."""
        if state.is_world_process_zero and logs is not None and "loss" in logs:
            logs.update(figures())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The monitor forgets this training."""
        if self._clock is not None:
            self._clock.close()


class _OffTheConsole(TrainerCallback):  # type: ignore[misc]
    """Takes the figures out again before the callback that prints a log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """What is printed stays as it was."""
        for name in [name for name in logs or () if name.startswith(PREFIX)]:
            del logs[name]
