"""Keras callback that reports a training run to evener's monitor and to the logs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import keras
import msgspec

from ..errors import RequestError
from ..live.files import Details
from ..live.metrics import metrics
from ..live.reporter import DeviceTimes, Reporter, middle, spread
from ..live.step_clock import KEPT_STEPS
from ..training.step_sums import StepSums
from .split import Split
from .tf_devices import driver_name


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that reports samples/s and step times to evener's monitor.

    In a group of processes, the first one reports for all.

    - `split`: the Split that built the model. The rows of a step are then taken from the data set
      or, if it doesn't show them, from the global batch. If both are unknown, nothing is reported.
    - `rows`: rows of a step, for a model without a split.
    - `log`: add the metrics to the logs at the end of each epoch. Callbacks that read them, such as
      TensorBoard's, must come later in the list.

    Raises RequestError if neither `split` nor `rows` is given.
    """

    def __init__(self, split: Split | None = None, *, rows: int = 0, log: bool = False) -> None:
        super().__init__()
        if split is None and rows < 1:
            raise RequestError(
                "Report has neither a split nor rows.",
                "Give it the split that built the model, or rows=, the rows of a step.",
            )
        self._split = split
        self._rows, self._log = rows, log
        self._steps: deque[float] = deque(maxlen=KEPT_STEPS)  # step durations in seconds
        self._ended = 0.0
        self._reporter = Reporter(self._describe, sums=self._sum_activities)
        self._counted = 0  # rows of this epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start counting the epoch's rows."""
        self._counted, self._ended = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report the rows of the steps since the last report."""
        if self._is_another_rank():
            return
        counted = self._count_rows(batch + 1)
        if counted == 0:
            return
        now = time.perf_counter()
        if self._ended:
            self._steps.append(now - self._ended)
        self._ended = now
        devices = self._devices()
        self._reporter.report(
            counted - self._counted,
            devices=devices,
            batches=self._split.shares if self._split is not None and devices else None,
            workload=self.model.name,
            framework="tensorflow",
        )
        self._counted = counted

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """If `log` is True, add evener's metrics to the epoch's logs, for later callbacks."""
        if self._log and logs is not None and not self._is_another_rank():
            logs.update(metrics())

    def on_train_end(self, logs: Any = None) -> None:
        """End the report."""
        self._reporter.close()

    def _is_another_rank(self) -> bool:
        """Return whether the first process of the group reports for this one."""
        split = self._split
        return split is not None and split.group is not None and split.group.rank > 0

    def _describe(self) -> tuple[Details, Sequence[DeviceTimes]]:
        details = Details(
            step_s=middle(self._steps),
            step_spread=spread(self._steps),
            plan_samples_per_second=self._predict_speed(),
        )
        hooks = getattr(self.model.fit, "hooks", None)
        if hooks is None:
            return details, ()
        sums, parts = hooks.times.sums, hooks.times.medians()
        measured = msgspec.structs.replace(
            details,
            input_s=parts.input_s,
            between_s=parts.between_s,
            recent=sums.recent(),
            errors=sums.errors(),
            whole=sums.whole,
        )
        return measured, hooks.engine.device_times() if self._devices() else ()

    def _sum_activities(self) -> StepSums:
        """Return the total seconds of all steps so far by activity, such as waiting for input.

        The sums are empty for a model without a split.
        """
        hooks = getattr(self.model.fit, "hooks", None) if self.model is not None else None
        return StepSums() if hooks is None else hooks.times.sums.whole

    def _predict_speed(self) -> float:
        """Return the plan's samples/s; 0 if it has none for this batch size."""
        split = self._split
        if split is None or split.plan is None:
            return 0.0
        plan = split.plan
        same = split.global_batch == plan.layout.global_batch
        return plan.throughput.samples_per_second if same else 0.0

    def _count_rows(self, steps: int) -> int:
        """Return the row count of the first `steps` steps of an epoch; 0 if unknown."""
        hooks = getattr(self.model.fit, "hooks", None)
        own = self._split.global_batch if self._split is not None else self._rows
        batch = getattr(hooks, "batch", None) or own or 0
        samples = getattr(hooks, "samples", None)
        return steps * batch if samples is None else min(steps * batch, samples)

    def _devices(self) -> Any:
        """Return the devices that train the model.

        The result is () without a split, or if a group trains without a plan.
        """
        split = self._split
        if split is None:
            return ()
        if split.group is not None:
            return split.rank_shares
        if split.plan is not None:
            return split.plan.layout.active
        return [driver_name(name) for name in split.devices]
