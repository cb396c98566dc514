"""Lightning callback that reports a training run to evener's monitor."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .lightning_passes import LIGHTNING
from .live.metrics import metrics
from .live.step_clock import ClockedReports

Callback: Any = import_module(f"{LIGHTNING}.callbacks").Callback
extract_batch_size = import_module(f"{LIGHTNING}.utilities.data").extract_batch_size


class Report(Callback):  # type: ignore[misc]  # lightning isn't followed
    """Lightning callback that reports training to evener's monitor and to the trainer's loggers.

    With a plan or `evener run`, the loggers get compute time (own work), waiting time, shares and
    samples/s. With a plan, the monitor gets the steps even without this callback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock: ClockedReports | None = None  # set if nothing else reports the steps
        self._rows = self._steps = 0  # rows of the current optimizer step; optimizer steps so far

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start reporting, unless the strategy already does."""
        if not hasattr(trainer.strategy, "planned"):
            name = type(pl_module).__name__
            self._clock = ClockedReports("torch", name, trainer.global_rank, trainer.world_size)
        self._rows, self._steps = 0, trainer.global_step

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start timing a step if this is its first batch, and count the batch's rows."""
        if self._clock is not None:
            if not self._rows:
                self._clock.begin()
            self._rows += extract_batch_size(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step if the optimizer has stepped.

        The metrics are logged every `log_every_n_steps` steps.
        """
        if trainer.global_step == self._steps:
            return
        if self._clock is not None:
            index = pl_module.device.index
            self._clock.end(self._rows, () if index is None else (index,))
        self._rows, self._steps = 0, trainer.global_step
        every = trainer.log_every_n_steps
        if trainer.is_global_zero and every and trainer.global_step % every == 0:
            found = metrics()
            for logger in trainer.loggers if found else ():
                logger.log_metrics(found, step=trainer.global_step - 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop timing until the next step, so that validation doesn't count as step time."""
        if self._clock is not None:
            self._clock.interrupt()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop reporting."""
        if self._clock is not None:
            self._clock.close()
