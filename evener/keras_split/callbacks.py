"""Callbacks of a fit: a report for the monitor, and what keeps a group's fit as one process would do it.

A group starts from one state, stops together and writes files once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import msgspec
import tensorflow as tf
from keras import callbacks as kinds

from ..errors import RequestError
from ..live.journal import TrainingJournal
from ..live.reporter import Details, Reporter
from ..plan.check import describe
from ..system.whole_files import write_atomically
from .multiworker import Workers
from .tf_devices import driver_name

if TYPE_CHECKING:
    from .split import Split

WRITERS = (kinds.BackupAndRestore, kinds.CSVLogger, kinds.TensorBoard)
BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class Together(kinds.Callback):  # type: ignore[misc]
    """The last callback of a fit: starts every process from the first one's state, and stops all when one stops."""

    def __init__(self, engine: Workers, share_weights: Callable[[], None], backup: Any) -> None:
        super().__init__()
        self._engine = engine
        self._group = engine.group
        self._share_weights = share_weights
        self._backup = backup

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin with what the first process has restored."""
        if self._backup is not None:
            _match_epoch(self._backup)
        epoch = getattr(self.model, "_initial_epoch", None) or 0
        (first,) = self._group.sum_now([tf.constant(0.0 if self._group.rank else float(epoch))])
        self.model._initial_epoch = int(first)
        self._share_weights()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The first process has written its files by then."""
        self.agree()
        self._engine.check_data()
        self._engine.share_retreats()

    def agree(self) -> None:
        """Stop if any process wants to."""
        (stops,) = self._group.sum_now([tf.constant(float(self.model.stop_training))])
        self.model.stop_training = bool(stops > 0)


class TogetherEachBatch(Together):
    """Callback that stops all processes after the same batch, where callbacks may stop in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop together, at the price of one more sum between the processes."""
        self.agree()


def group_callbacks(given: Any, engine: Workers, share_weights: Callable[[], None]) -> list[Any]:
    """The callbacks of this process: only the first one's write files; what comes last keeps all in step."""
    group = engine.group
    own = keras.tree.flatten(given.callbacks if isinstance(given, kinds.CallbackList) else given or [])
    (stopping,) = group.sum_now([tf.constant(float(sum(map(_may_stop, own))))])
    backup = None
    if group.rank:
        own = [each for each in own if not isinstance(each, WRITERS)]
    for each in own:
        if isinstance(each, kinds.ModelCheckpoint) and group.rank:
            each._should_save_model = functools.partial(_only_judge, each._should_save_model)
        if isinstance(each, kinds.BackupAndRestore):
            backup, each._save_model = each, functools.partial(_save_backup, each)
    kind = TogetherEachBatch if stopping > 0 else Together
    return [*own, kind(engine, share_weights, backup)]


def _may_stop(callback: Any) -> bool:
    """True if a callback looks at batches, and isn't one of Keras' that do the same in every process."""
    kind = type(callback)
    known = kind.__module__.startswith(("keras.", "evener.")) and kind is not kinds.LambdaCallback
    own = (name in vars(callback) or getattr(kind, name) is not getattr(kinds.Callback, name) for name in BATCH_HOOKS)
    return not known and any(own)


def _only_judge(judge: Callable[..., bool], *figures: Any, **named: Any) -> bool:
    """A ModelCheckpoint that keeps its best figure, and writes nothing."""
    judge(*figures, **named)
    return False


def _save_backup(backup: Any) -> None:
    """Save as BackupAndRestore does, but a process that is killed at any moment leaves the weights of a known epoch."""
    path, steps = Path(backup._training_metadata_path), int(backup.model.optimizer.iterations)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = getattr(backup, "saved", backup.model._initial_epoch or 0)
    note = {"epoch": backup._current_epoch, "batch": backup._last_batch_seen, "steps": steps, "before": before}
    write_atomically(path, json.dumps(note).encode())
    backup.model.save_weights(backup._weights_path)
    backup.saved = backup._current_epoch


def _match_epoch(backup: Any) -> None:
    """The epoch of the weights that were restored: those of the save before, if the last one was interrupted."""
    with suppress(OSError):
        note = json.loads(Path(backup._training_metadata_path).read_text())
        if note.get("steps", int(backup.model.optimizer.iterations)) != int(backup.model.optimizer.iterations):
            backup.model._initial_epoch = note["before"]


def save_whole(rank: int, save: Callable[..., Any], filepath: Any, *arguments: Any, **named: Any) -> Any:
    """`save` or `save_weights` in one step: a reader always finds a whole file, even if the process is killed."""
    path = str(filepath)
    other = "://" in path or named.get("zipped") is False or named.get("overwrite") is False
    if other or not path.endswith((".keras", ".h5")):
        return save(filepath, *arguments, **named)
    folder, name = os.path.split(os.path.realpath(path))
    temporary = os.path.join(folder, f".rank{rank}.{name}")
    try:
        save(temporary, *arguments, **named)
        os.replace(temporary, os.path.join(folder, name))
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    return None


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports samples/s of each device after every step; `split` names the devices, `batch` the samples of a step.

    Without `batch` and `samples` (those of an epoch) they are the fit's own, where it is given arrays, else the split's
    global batch. The first step of each batch size is left out of samples/s: TensorFlow traces and tunes there. In a
    group each process reports its own rows. With `journal`, `evener runs` has the training's steps/s and restarts.
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
        self.batch = batch or getattr(hooks, "batch", None) or (self._split.global_batch if self._split else None)
        self.samples = samples or getattr(hooks, "samples", None)
        self._traced.clear()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """A new epoch counts from its first step."""
        self._last_step, self._counted = -1, 0
        self._note_retreats()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps since the last call: Keras calls once for several when it runs them in one execution."""
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
        return samples if self._given[0] or not split or not split.group else split.cut.sizes(samples)[split.group.rank]

    def _labels(self) -> dict[str, Any]:
        labels: dict[str, Any] = {"framework": "tensorflow", "workload": self.model.name}
        split = self._split
        if split is None:
            return labels
        devices = split.plan.layout.active if split.plan else [driver_name(name) for name in split.devices]
        if split.group is None:
            return labels | {"devices": devices, "batches": split.shares}
        rank = split.group.rank
        if not split.rank_shares:
            own = driver_name(split.group.device) if split.group.device.startswith("GPU") else devices[rank]
            return labels | {"devices": [own]}
        now = {"batch": split.shares[rank], "micro": (split.cut.micros or split.shares)[rank]}
        return labels | {"devices": [msgspec.structs.replace(split.rank_shares[rank], **now)]}

    def _describe(self) -> Details:
        """The times of a step in a process of a group; none where one process trains on all devices."""
        hooks = getattr(self.model.fit, "hooks", None)
        if hooks is None or not isinstance(hooks.engine, Workers):
            return Details()
        plan = self._split.plan if self._split else None
        measured = plan is not None and plan.layout.engine in ("", hooks.engine.name)
        return hooks.engine.describe(plan.throughput.samples_per_second if plan and measured else 0.0)


def _keep_journal(split: Split | None) -> TrainingJournal | None:
    """The journal of the whole training, for its first process."""
    if split is None:
        raise RequestError("A journal needs the split.", "Write Report(split, journal=True).")
    if split.group is not None and split.group.rank:
        return None
    names = [describe(share) for share in split.plan.layout.active] if split.plan else list(split.devices)
    return TrainingJournal(names, split.shares)
