"""A callback that reports a fit's samples/s to the monitor, and keeps the training's journal."""

from __future__ import annotations

from typing import Any

import keras
import msgspec

from ..errors import RequestError
from ..live.files import Details
from ..live.journal import TrainingJournal
from ..live.reporter import DeviceTimes, Reporter
from ..plan.check import describe
from .multiworker import Workers
from .split import Split
from .tf_devices import driver_name


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports samples/s of each device after every step; `split` names the devices, `batch` the
    samples of a step.

    Without `batch` and `samples` (those of an epoch) they are the fit's own, where it is given
    arrays, else the split's global batch. The first step of each batch size is left out of
    samples/s: TensorFlow traces and tunes there. In a group each process reports its own rows. With
    `journal`, `evener runs` has the training's steps/s and restarts.
    """

    def __init__(
        self,
        split: Split | None = None,
        *,
        batch: int | None = None,
        samples: int | None = None,
        journal: bool = False,
    ) -> None:
        super().__init__()
        self._split = split
        self._given = batch, samples
        self.batch = batch
        self.samples = samples
        self._journal = _keep_journal(split) if journal else None
        self._noted = 0  # retreats that the journal has
        self._reporter = Reporter(self._describe, self._journal)
        self._last_step = -1
        self._counted = 0  # samples of this epoch
        self._traced: set[tuple[int, bool]] = set()  # kinds of step that have run

    def on_train_begin(self, logs: Any = None) -> None:
        """The samples of a step and of an epoch are those of this training."""
        hooks = getattr(self.model.fit, "hooks", None)
        batch, samples = self._given
        self.batch = (
            batch
            or getattr(hooks, "batch", None)
            or (self._split.global_batch if self._split else None)
        )
        self.samples = samples or getattr(hooks, "samples", None)
        self._traced.clear()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """A new epoch counts from its first step."""
        self._last_step, self._counted = -1, 0
        self._note_retreats()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps since the last call: Keras calls once for several when it runs them in
        one execution.
        """
        if self.batch is None:
            return
        samples = (batch - self._last_step) * self.batch
        if self.samples is not None:
            samples = max(0, min(samples, self.samples - self._counted))
        self._last_step, self._counted = batch, self._counted + samples
        # an epoch's last batch may be short where nobody says how many samples there are
        kind = samples, self.samples is None and batch + 1 == self.params.get("steps")
        self._reporter.report(self._own(samples), timed=kind in self._traced, **self._labels())
        self._traced.add(kind)

    def on_train_end(self, logs: Any = None) -> None:
        """The monitor forgets this training."""
        self._note_retreats()
        self._reporter.close()

    def _note_retreats(self) -> None:
        """Give the journal the passes that ran out of memory in an epoch, of all processes."""
        hooks = getattr(self.model.fit, "hooks", None)
        if self._journal is not None and hooks is not None and isinstance(hooks.engine, Workers):
            for line in hooks.engine.lines[self._noted :]:
                self._journal.note_retreat(line)
            self._noted = len(hooks.engine.lines)

    def _own(self, samples: int) -> int:
        """The samples of this process."""
        split = self._split
        return (
            samples
            if self._given[0] or not split or not split.group
            else split.cut.sizes(samples)[split.group.rank]
        )

    def _labels(self) -> dict[str, Any]:
        labels: dict[str, Any] = {"framework": "tensorflow", "workload": self.model.name}
        split = self._split
        if split is None:
            return labels
        devices = (
            split.plan.layout.active
            if split.plan
            else [driver_name(name) for name in split.devices]
        )
        if split.group is None:
            return labels | {"devices": devices, "batches": split.shares}
        rank = split.group.rank
        if not split.rank_shares:
            own = (
                driver_name(split.group.device)
                if split.group.device.startswith("GPU")
                else devices[rank]
            )
            return labels | {"devices": [own]}
        now = {"batch": split.shares[rank], "micro": (split.cut.micros or split.shares)[rank]}
        return labels | {"devices": [msgspec.structs.replace(split.rank_shares[rank], **now)]}

    def _describe(self) -> tuple[Details, tuple[DeviceTimes, ...]]:
        """The times of a step in a process of a group; none where one process trains on all
        devices.
        """
        hooks = getattr(self.model.fit, "hooks", None)
        if hooks is None or not isinstance(hooks.engine, Workers):
            return Details(), ()
        plan = self._split.plan if self._split else None
        measured = plan is not None and plan.layout.engine in ("", hooks.engine.name)
        return hooks.engine.describe(
            plan.throughput.samples_per_second if plan and measured else 0.0
        )


def _keep_journal(split: Split | None) -> TrainingJournal | None:
    """The journal of the whole training, for its first process."""
    if split is None:
        raise RequestError("A journal needs the split.", "Write Report(split, journal=True).")
    if split.group is not None and split.group.rank:
        return None
    names = (
        [describe(share) for share in split.plan.layout.active]
        if split.plan
        else list(split.devices)
    )
    return TrainingJournal(names, split.shares, split.plan.created if split.plan else "")
