"""Keras callbacks for training in several processes, and functions that save files."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import callbacks as kinds

from ..system.files import write_atomically

WRITERS = (kinds.BackupAndRestore, kinds.CSVLogger, kinds.TensorBoard)
BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class GroupSync(kinds.Callback):  # type: ignore[misc]
    """Keras callback that keeps the processes of a group synchronized.

    All processes start with the same epoch and weights, and stop together. `backup` is the user's
    BackupAndRestore callback, or None.
    """

    def __init__(self, engine: Any, share_weights: Callable[[], None], backup: Any) -> None:
        super().__init__()
        self._engine = engine
        self._group = engine.group
        self._share_weights = share_weights
        self._backup = backup

    def on_train_begin(self, logs: Any = None) -> None:
        """Copy the first process's epoch and weights to all processes."""
        if self._backup is not None:
            _match_epoch(self._backup)
        epoch = getattr(self.model, "_initial_epoch", None) or 0
        (first,) = self._group.sum_now([tf.constant(0.0 if self._group.rank else float(epoch))])
        self.model._initial_epoch = int(first)
        self._share_weights()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop all processes if one stops, and check that all have trained on the same data.

        Raises RequestError if their data differ.
        """
        # This callback is last, so the first process has already written its files.
        self.share_stop()
        self._engine.check_data(epoch_ends=True)

    def share_stop(self, *_: Any, **__: Any) -> None:
        """Stop the training in all processes if `stop_training` is set in any of them.

        Every process has to call this.
        """
        (stops,) = self._group.sum_now([tf.constant(float(self.model.stop_training))])
        self.model.stop_training = bool(stops > 0)


class EpochStartCallback(kinds.Callback):  # type: ignore[misc]
    """Keras callback that calls a function at the start of each epoch."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the function that was given to the constructor."""
        self._call()


def with_callback(callbacks: Any, own: kinds.Callback, model: Any) -> Any:
    """Return the user's callbacks for `fit`, with the callback `own` as the last one."""
    if not isinstance(callbacks, kinds.CallbackList):
        return [*keras.tree.flatten(callbacks or []), own]
    own.set_model(model)
    callbacks.append(own)
    return callbacks


def group_callbacks(callbacks: Any, engine: Any, share_weights: Callable[[], None]) -> list[Any]:
    """Return the callbacks that this process of a group uses; the last one is a GroupSync.

    Only the first process keeps callbacks that write files. If a callback of any process may stop
    the training within an epoch, the processes check for that after each batch. Every process has
    to call this.
    """
    group = engine.group
    own = keras.tree.flatten(
        callbacks.callbacks if isinstance(callbacks, kinds.CallbackList) else callbacks or []
    )
    (stopping,) = group.sum_now([tf.constant(float(sum(map(_may_stop, own))))])
    backup = None
    if group.rank:
        own = [each for each in own if not isinstance(each, WRITERS)]
    for each in own:
        if isinstance(each, kinds.ModelCheckpoint) and group.rank:
            each._should_save_model = functools.partial(_skip_saving, each._should_save_model)
        if isinstance(each, kinds.BackupAndRestore):
            backup, each._save_model = each, functools.partial(_save_backup, each)
    last = GroupSync(engine, share_weights, backup)
    if (
        stopping > 0
        # a callback may stop within an epoch, and stopping together takes one all-reduce per
        # batch
    ):
        last.on_train_batch_end = last.share_stop
    return [*own, last]


def _may_stop(callback: Any) -> bool:
    """Return whether a callback runs user code for each batch, which could stop the training."""
    kind = type(callback)
    # Keras' and evener's callbacks do the same in every process, but a LambdaCallback runs the
    # user's code
    known = kind.__module__.startswith(("keras.", "evener.")) and kind is not kinds.LambdaCallback
    own = (
        name in vars(callback) or getattr(kind, name) is not getattr(kinds.Callback, name)
        for name in BATCH_HOOKS
    )
    return not known and any(own)


def _skip_saving(judge: Callable[..., bool], *values: Any, **named: Any) -> bool:
    """Replacement for a ModelCheckpoint's method that decides whether to save the model.

    `judge` is the original method, which updates the best value. The result is always False.
    """
    judge(*values, **named)
    return False


def _save_backup(backup: Any) -> None:
    """Save a BackupAndRestore callback's epoch, and then the weights.

    If the process is killed in between, `_match_epoch` detects this by the step count.
    """
    path, steps = Path(backup._training_metadata_path), int(backup.model.optimizer.iterations)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = getattr(backup, "saved", backup.model._initial_epoch or 0)
    # written before the weights, with the previous save's epoch, so that the epoch is known even if
    # the process is killed meanwhile (see `_match_epoch`)
    note = {
        "epoch": backup._current_epoch,
        "batch": backup._last_batch_seen,
        "steps": steps,
        "before": before,
    }
    write_atomically(path, json.dumps(note).encode())
    backup.model.save_weights(backup._weights_path)
    backup.saved = backup._current_epoch


def _match_epoch(backup: Any) -> None:
    """Set the first epoch to that of the restored weights, if the last save was interrupted.

    `backup` is a BackupAndRestore callback that has restored the weights already. An interrupted
    save has stored the new epoch, but not the new weights.
    """
    with suppress(OSError):
        note = json.loads(Path(backup._training_metadata_path).read_text())
        # another optimizer step: the last save was interrupted, so the weights are those of the one
        # before
        if note.get("steps", int(backup.model.optimizer.iterations)) != int(
            backup.model.optimizer.iterations
        ):
            backup.model._initial_epoch = note["before"]


def save_by_renaming(
    rank: int, save: Callable[..., Any], filepath: Any, *arguments: Any, **named: Any
) -> Any:
    """Save a model to a temporary file by calling `save`, and then rename the file.

    Thus a reader always finds a complete file. Formats other than `.keras` and `.h5`, remote paths,
    and calls with `zipped=False` or `overwrite=False` are saved directly.
    """
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
