"""A callback that tells the monitor how fast a training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from evener.keras_split.fit_hooks import Fitting
from evener.keras_split.tf_devices import known_as
from evener.live import Reporter

if TYPE_CHECKING:
    from evener.keras_split.split import Split


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports samples/s of each device after every step; `split` says which devices, `batch` the samples of a step.

    Without `batch` it is the batch size that arrays are fitted with, else the split's global batch. A short last batch
    is counted by its true size if `samples`, those of an epoch, is given. In a group each process reports its own rows.
    """

    def __init__(self, split: Split | None = None, *, batch: int | None = None, samples: int | None = None) -> None:
        super().__init__()
        self._split = split
        self._given = batch
        self.batch = batch
        self._samples = samples
        self._reporter = Reporter()
        self._seen = -1
        self._counted = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """The samples of a step are those of this training."""
        fitting = getattr(self.model.fit, "__self__", None)
        size = fitting.batch if isinstance(fitting, Fitting) else None
        self.batch = self._given or (_own_batch(self._split, size) if self._split else None)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """A new epoch counts from its first step."""
        self._seen, self._counted = -1, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps since the last call: Keras calls once for several when it runs them in one execution."""
        if self.batch is None:
            return
        samples = (batch - self._seen) * self.batch
        if self._samples is not None:
            samples = min(samples, self._samples - self._counted)
        self._seen, self._counted = batch, self._counted + samples
        self._reporter.report(max(0, samples), **self._words())

    def on_train_end(self, logs: Any = None) -> None:
        """The monitor forgets this training."""
        self._reporter.close()

    def _words(self) -> dict[str, Any]:
        words: dict[str, Any] = {"framework": "tensorflow", "workload": self.model.name}
        split = self._split
        if split is None:
            return words
        if split.plan is not None and split.group is None:
            return words | {"devices": split.plan.layout.active}
        if split.group is None:
            return words | {"devices": [known_as(name) for name in split.devices], "batches": split.shares}
        rank, own = split.group.rank, split.group.device
        if split.plan is not None:
            return words | {"devices": [split.plan.layout.active[rank]]}
        return words | {"devices": [known_as(own if own.startswith("GPU") else split.devices[rank])]}


def _own_batch(split: Split, size: int | None) -> int | None:
    """The samples of a step of `size`, else of the split's global batch, that this process computes."""
    size = size or split.global_batch
    if size is None:
        return None
    return split.cut.sizes(size)[split.group.rank] if split.group else size
