"""A callback that reports a fit's samples/s to the monitor."""

from __future__ import annotations

from typing import Any

import keras

from ..live.reporter import Reporter
from .split import Split
from .tf_devices import driver_name


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports samples/s of a split's devices to the monitor after every step, as `evener.report`
    does.

    In a group, the first process reports for all. A step of a dataset, whose rows aren't known,
    counts as the split's global batch; without one, nothing is reported.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split
        self._reporter = Reporter()
        self._counted = 0  # rows of this epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Rows are counted from here on."""
        self._counted = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report the steps since the last call: Keras calls once for several that it runs in one
        execution.
        """
        if self._split.group is not None and self._split.group.rank > 0:
            return
        counted = self._count_rows(batch + 1)
        if counted == 0:
            return
        devices = self._devices()
        self._reporter.report(
            counted - self._counted,
            devices=devices,
            batches=self._split.shares if devices else None,
            workload=self.model.name,
            framework="tensorflow",
        )
        self._counted = counted

    def on_train_end(self, logs: Any = None) -> None:
        """The monitor forgets this training."""
        self._reporter.close()

    def _count_rows(self, steps: int) -> int:
        """The rows of an epoch's first steps."""
        hooks = getattr(self.model.fit, "hooks", None)
        batch = getattr(hooks, "batch", None) or self._split.global_batch or 0
        samples = getattr(hooks, "samples", None)
        return steps * batch if samples is None else min(steps * batch, samples)

    def _devices(self) -> Any:
        """The devices in the order of the split's shares; none where a group trains without a
        plan.
        """
        split = self._split
        if split.group is not None:
            return split.rank_shares
        if split.plan is not None:
            return split.plan.layout.active
        return [driver_name(name) for name in split.devices]
