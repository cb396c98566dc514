"""`Report`: a callback that sends the samples/s of a `fit` to the monitor."""

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
    """Reports the samples/s of a split's devices to the monitor after every step.

    For a model that trains without a split, pass `rows`, the number of rows per step. In a group of
    processes, the first one reports for all. If a dataset doesn't tell how many rows a step has,
    the split's global batch is assumed. If that isn't known either, nothing is reported.

    With `log`, the shares, the samples/s and their ratio to the plan's are added to the `logs` at
    the end of each epoch. The callbacks of TensorBoard, W&B and MLflow read these logs, so they
    must come after this callback.

    Raises RequestError without a split and without `rows`.
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
        self._reporter = Reporter(self._describe, sums=self._whole)
        self._counted = 0  # rows of this epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the row count and the step clock at the beginning of an epoch."""
        self._counted, self._ended = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report the steps since the last call.

        Keras calls this once per execution, which may have several steps.
        """
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
        """Add shares and samples/s to the logs, if `log` is set."""
        # Later callbacks read the logs.
        if self._log and logs is not None and not self._is_another_rank():
            logs.update(metrics())

    def on_train_end(self, logs: Any = None) -> None:
        """Remove this training from the monitor."""
        self._reporter.close()

    def _is_another_rank(self) -> bool:
        """True if another process of the group reports for this one."""
        # The first process of a group reports for all.
        split = self._split
        return split is not None and split.group is not None and split.group.rank > 0

    def _describe(self) -> tuple[Details, Sequence[DeviceTimes]]:
        details = Details(
            step_s=middle(self._steps),
            step_spread=spread(self._steps),
            plan_samples_per_second=self._promised(),
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

    def _whole(self) -> StepSums:
        """Return the durations of the steps' parts, summed over all steps."""
        # The sums are empty before the model has the hooks of a split. A part of a step is, for
        # example, the wait for input.
        hooks = getattr(self.model.fit, "hooks", None) if self.model is not None else None
        return StepSums() if hooks is None else hooks.times.sums.whole

    def _promised(self) -> float:
        """Return the plan's samples/s; 0 unless its global batch is the split's."""
        split = self._split
        if split is None or split.plan is None:
            return 0.0
        plan = split.plan
        same = split.global_batch == plan.layout.global_batch
        return plan.throughput.samples_per_second if same else 0.0

    def _count_rows(self, steps: int) -> int:
        """Return how many rows an epoch's first steps have; 0 if unknown."""
        hooks = getattr(self.model.fit, "hooks", None)
        own = self._split.global_batch if self._split is not None else self._rows
        batch = getattr(hooks, "batch", None) or own or 0
        samples = getattr(hooks, "samples", None)
        return steps * batch if samples is None else min(steps * batch, samples)

    def _devices(self) -> Any:
        """Return the devices in the order of the split's shares."""
        # () also if a group trains without a plan
        split = self._split
        if split is None:
            return ()
        if split.group is not None:
            return split.rank_shares
        if split.plan is not None:
            return split.plan.layout.active
        return [driver_name(name) for name in split.devices]
