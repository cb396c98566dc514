"""A callback that reports a Lightning training to the monitor, and its figures to the trainer's
loggers, with a plan or without.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .lightning_passes import LIGHTNING
from .live.figures import figures
from .live.step_clock import ClockedReports

Callback: Any = import_module(f"{LIGHTNING}.callbacks").Callback
extract_batch_size = import_module(f"{LIGHTNING}.utilities.data").extract_batch_size


class Report(Callback):  # type: ignore[misc]  # lightning isn't followed
    """Reports a training's steps to the monitor, and own work, waiting, shares and samples/s to the
    loggers of its trainer.

    Under a plan or `evener run` the steps are reported anyway; without, the figures are samples/s,
    the time of a step, and the wait for data. The loggers get them as often as anything that a
    module logs in a step (`log_every_n_steps`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock: ClockedReports | None = None  # where nothing else reports the steps
        self._rows = self._steps = 0  # of the current optimizer step; optimizer steps so far

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A plan reports the steps of its trainers."""
        if not hasattr(trainer.strategy, "planned"):
            name = type(pl_module).__name__
            self._clock = ClockedReports("torch", name, trainer.global_rank, trainer.world_size)
        self._rows, self._steps = 0, trainer.global_step

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is there; that of an optimizer step's first pass begins it."""
        if self._clock is not None:
            if not self._rows:
                self._clock.begin()
            self._rows += extract_batch_size(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an optimizer step once it is done, and log."""
        if trainer.global_step == self._steps:
            return
        if self._clock is not None:
            index = pl_module.device.index
            self._clock.end(self._rows, () if index is None else (index,))
        self._rows, self._steps = 0, trainer.global_step
        every = trainer.log_every_n_steps
        if trainer.is_global_zero and every and trainer.global_step % every == 0:
            found = figures()
            for logger in trainer.loggers if found else ():
                logger.log_metrics(found, step=trainer.global_step - 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The step after a validation isn't a slow one."""
        if self._clock is not None:
            self._clock.interrupt()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The monitor forgets this training."""
        if self._clock is not None:
            self._clock.close()
