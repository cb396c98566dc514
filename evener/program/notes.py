"""Prints messages on rank 0 of a user's script, and reports each rank to `evener run` at exit."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec

from ..training.launched import PROGRAM, launched_device, launched_run
from ..training.rebalance import name_devices
from ..training.step_record import ShareTimes, StepRecord
from .group import current_rank

READ_STEPS = 10  # number of steps between readings of the timer, which stores the last 25 steps


class SharesOrigin(msgspec.Struct, frozen=True):
    """Model and batch size for which shares were optimized; they may be wrong for others."""

    model: str  # a digest of the shapes and types of its parameters and buffers
    rows: int  # rows per step


class ProgramSettings(msgspec.Struct, frozen=True):
    """Settings that `evener run` passes to the script's processes in an environment variable."""

    folder: str  # folder for the RankNote of each rank; "" writes none
    name: str  # name of the program, for messages
    strict: bool = False  # raise RequestError instead of training with equal shares
    rebalance: bool = True  # change shares during training if step times differ
    noise: bool = False  # estimate the gradient noise scale
    origin: SharesOrigin | None = None  # set if the plan's shares come from an earlier training run


class RankNote(msgspec.Struct):
    """What a rank reports when it exits: active hooks, step times and why shares stayed equal."""

    rank: int
    device: str  # id of the device
    run: str  # name of the journal
    hooks: str = ""  # the hooks that took effect; empty if the program trained unchanged
    why: str = ""  # why shares stayed equal or the program ran unchanged
    first: ShareTimes | None = None  # step times with the first shares
    last: ShareTimes | None = None  # step times with the last shares
    retreats: int = 0  # number of passes that ran out of memory and were computed again
    noise: str = ""  # a message about the noise scale
    changes: int = 0  # number of changes of shares that took effect in a step
    model: str = ""  # a digest of the shapes and types of its parameters and buffers


def read_settings() -> ProgramSettings:
    """Return the settings that `evener run` has put in the environment, or else the defaults."""
    text = os.environ.get(PROGRAM)
    return msgspec.json.decode(text, type=ProgramSettings) if text else ProgramSettings("", "")


def print_on_first_rank(message: str) -> None:
    """Print "evener: " and the message as a line to stderr, on rank 0 only."""
    # With several ranks, a line break keeps it off a progress bar. It begins with a carriage
    # return, so that tools that merge the output of processes drop the empty line.
    if current_rank() == 0:
        begin = "\r\n" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        sys.stderr.write(f"{begin}evener: {message}\n")
        sys.stderr.flush()


class Notebook:
    """Prints messages about the training run, and writes this rank's `RankNote` when it exits."""

    def __init__(self, settings: ProgramSettings) -> None:
        self.settings = settings
        self.hooks = self.why = ""
        self.model = ""  # a digest of the models that train by shares
        # why shares stay equal; printed at the end unless another reason is printed before
        self.pending_reason = ""
        self._supposes_even = False
        self.warned: set[str] = set()
        self.was_uneven = False  # True once ranks have had different numbers of rows in a step
        self._training: Any = None
        self._record = StepRecord()
        self._steps = 0
        self._read = 0  # the newest step in the record
        atexit.register(self.leave)
        # atexit handlers don't run in a forked process
        if multiprocessing.parent_process() is not None:
            Finalize(None, self.leave, exitpriority=1)

    def watch(self, training: Any, hooks: str) -> None:
        """Print which devices train with which shares, and record step times from now on.

        `hooks` names the classes that are hooked, for example "DistributedDataParallel and
        DataLoader".
        """
        self.hooks, self._training = hooks, training
        self._record, self._steps, self._read = StepRecord(), 0, 0
        training.listeners.insert(0, self._note_step)
        shares = training.ranks
        names = name_devices(shares.shares)
        # ranks that a launcher started know only their own device
        named = ", ".join(names or [share.name or share.device for share in shares.shares])
        split = "+".join(map(str, shares.batches)) + " = " if len(shares.batches) > 1 else ""
        print_on_first_rank(
            f"{self.settings.name} trains on {named}: {split}{shares.global_batch} rows a "
            f"step, with {hooks}"
        )

    def stay_even(self, why: str, suffix: str = "") -> None:
        """Print and record why shares stay equal; only the first reason counts.

        `suffix` is printed after the reason, but not recorded.
        """
        if not self.why:
            self.why = why.rstrip(".")
            print_on_first_rank(f"shares stay equal: {self.why}{suffix}")

    def suppose_even(self, why: str) -> None:
        """Print why shares are equal for now; a later loop may still get unequal shares.

        If no loop gets them, `why` becomes the reason in the `RankNote`.
        """
        self.pending_reason, self._supposes_even = why, True
        print_on_first_rank(f"shares stay equal: {why}")

    def warn(self, message: str) -> None:
        """Print a warning, unless the same one was printed before."""
        if message not in self.warned:
            self.warned.add(message)
            print_on_first_rank(message)

    def _note_step(self, _: Any) -> None:
        self._steps += 1
        self.was_uneven |= len(set(self._training.ranks.batches)) > 1
        if self._steps % READ_STEPS == 0:
            self._read_steps()

    def _read_steps(self) -> None:
        """Record the timer's new step times, except for steps with a partial batch."""
        for step in self._training.timer.last():
            if step.number <= self._read:
                continue
            self._read = step.number
            if sum(step.sizes) == self._training.ranks.global_batch:
                self._record.add(step.sizes, step.own_work_s, step.step_s, step.disturbed)

    def leave(self) -> None:
        """Write this rank's `RankNote` to the folder that `evener run` has chosen.

        If nothing has trained with the plan's shares, and a reason for that is pending, the note
        includes the reason. It is also printed, unless that was done before. Without a folder,
        nothing happens.
        """
        if not self.settings.folder:
            return
        if not self.hooks and self._supposes_even:
            self.why = self.why or self.pending_reason
        elif not self.hooks and self.pending_reason:
            self.stay_even(self.pending_reason)
        note = RankNote(
            current_rank(),
            launched_device(),
            launched_run(),
            self.hooks,
            self.why,
        )
        if self._training is not None:
            self._read_steps()
            note.first, note.last = self._record.first, self._record.last
            note.changes = self._record.changes
            note.noise = self._training.noise.describe() if self._training.noise else ""
            note.retreats = self._training.reporter.retreats
            note.model = self.model
        Path(self.settings.folder, f"{note.rank}.json").write_bytes(msgspec.json.encode(note))
