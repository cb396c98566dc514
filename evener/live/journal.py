"""The journal of a training that asks for one: its steps/s, changes of shares and restarts, as JSON
lines in a run.

The launcher names the run, so a training that starts again goes on in the same file. A folder or
disk that can't be written is one warning, and the training goes on.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ..errors import RequestError
from ..system.files import new_run_id, runs_folder, trusted_folder
from ..training.launched import launched_run, restart_reason
from ..training.noise_scale import NoiseScale
from .files import LONGEST_TEXT, Count, LiveRecord, Rate, ShareChange, start_ticks

At = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # seconds since the epoch

TRAINING_JOURNAL = "training.jsonl"
SPEED_SECONDS = 30.0  # between two lines of steps/s


class StartEntry(msgspec.Struct, frozen=True, tag="started", tag_field="entry"):
    """The processes of the training began, for the first time or again."""

    at: At
    workload: str
    framework: str
    devices: tuple[str, ...]  # of each rank
    shares: tuple[Count, ...]
    plan_samples_per_second: Rate  # that the plan expects; 0: no plan
    host: str
    pid: int  # of the first rank
    ticks: int  # its start in clock ticks since boot
    reason: str = ""  # why the launcher has started it again


class SpeedEntry(msgspec.Struct, frozen=True, tag="speed", tag_field="entry"):
    """The training's speed in the last seconds."""

    at: At
    step: Count  # since the processes began
    steps_per_second: Rate
    samples_per_second: Rate  # of all devices


class ChangeEntry(msgspec.Struct, frozen=True, tag="changed", tag_field="entry"):
    """The shares became others."""

    change: ShareChange


class RetreatEntry(msgspec.Struct, frozen=True, tag="retreated", tag_field="entry"):
    """A pass ran out of memory, and its rows were computed in smaller ones."""

    at: At
    line: str  # with the device, the step, the rows before and after, and the seconds it took


class NoiseEntry(msgspec.Struct, frozen=True, tag="noise", tag_field="entry"):
    """The noise scale of the training's gradient so far."""

    at: At
    step: Count  # since the processes began
    batch: Count  # rows of a step
    scale: NoiseScale


class EndEntry(msgspec.Struct, frozen=True, tag="ended", tag_field="entry"):
    """The end of a training that ended by itself; one that is killed, or interrupted by Ctrl-C,
    writes none.
    """

    at: At
    failure: str = ""  # the exception, its first line


TrainingEntry = StartEntry | SpeedEntry | ChangeEntry | RetreatEntry | NoiseEntry | EndEntry
TrainingState = Literal["running", "finished", "stopped", "failed"]


class TrainingRecord(msgspec.Struct, frozen=True):
    """The content of a training's journal; the first entry is its start."""

    run: str
    entries: tuple[TrainingEntry, ...]

    @property
    def start(self) -> StartEntry:
        """The last start: its devices and shares are those of now."""
        return next(entry for entry in reversed(self.entries) if isinstance(entry, StartEntry))

    @property
    def state(self) -> TrainingState:
        """The state of the training; one that was killed or interrupted has stopped."""
        last, start = self.entries[-1], self.start
        if isinstance(last, EndEntry):
            return "failed" if last.failure else "finished"
        is_here = start.host == socket.gethostname()
        return "running" if is_here and start_ticks(start.pid) == start.ticks else "stopped"

    @property
    def failure(self) -> str:
        """The exception that ended it."""
        last = self.entries[-1]
        return last.failure if isinstance(last, EndEntry) else ""

    @property
    def began_at(self) -> float:
        """Seconds since the epoch."""
        first = self.entries[0]
        return first.at if isinstance(first, StartEntry) else 0.0

    @property
    def seconds(self) -> float:
        """The seconds from the first start to the last entry, or to now."""
        times = [entry.at for entry in self.entries if not isinstance(entry, ChangeEntry)]
        return (time.time() if self.state == "running" else times[-1]) - self.began_at

    @property
    def samples_per_second(self) -> float | None:
        """The last that was written."""
        speeds = (
            entry.samples_per_second
            for entry in reversed(self.entries)
            if isinstance(entry, SpeedEntry)
        )
        return next(speeds, None)


class TrainingJournal:
    """The journal of one training, written by its first rank."""

    def __init__(self, devices: Sequence[str], shares: Sequence[int]) -> None:
        self._devices = tuple(devices)
        self._shares = tuple(shares)
        self._run = launched_run() or new_run_id()
        self._descriptor = -1
        self._last: LiveRecord | None = None
        self._from: LiveRecord | None = None  # from which the next steps/s count
        self._changes: set[ShareChange] = set()
        self._retreats: list[RetreatEntry] = []  # that aren't written yet

    def note(self, record: LiveRecord) -> None:
        """Keep what is new in a report of the first rank."""
        if self._descriptor < 0:
            self._begin(record)
        self._last = record
        for change in record.changes:
            if change not in self._changes:
                self._changes.add(change)
                self._append(ChangeEntry(change))
        self._write_retreats()
        if self._from is None or record.updated_at >= self._from.updated_at + SPEED_SECONDS:
            self._note_speed(record)

    def note_retreat(self, line: str) -> None:
        """Keep the line that the terminal has of a pass that ran out of memory, on any rank."""
        self._retreats.append(RetreatEntry(time.time(), line[:LONGEST_TEXT]))

    def _write_retreats(self) -> None:
        for retreat in self._retreats:
            self._append(retreat)
        self._retreats = []

    def close(self) -> None:
        """Say how fast it was last, and that it has ended."""
        if self._descriptor < 0 or self._last is None:
            return
        self._write_retreats()
        self._note_speed(self._last)
        error = getattr(sys, "last_value", None)
        if not isinstance(error, KeyboardInterrupt):
            first, *_ = str(error).splitlines() or [""]
            self._append(
                EndEntry(time.time(), f"{type(error).__name__}: {first[:200]}" if error else "")
            )
        os.close(self._descriptor)
        self._descriptor = -1

    def _begin(self, record: LiveRecord) -> None:
        self._from = None
        try:
            path = trusted_folder(runs_folder() / self._run) / TRAINING_JOURNAL
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
        except (OSError, RequestError) as error:
            warnings.warn(f"The training's journal can't be written: {error}", stacklevel=2)
            self._descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        pid = os.getpid()
        self._append(
            StartEntry(
                record.updated_at,
                record.workload,
                record.framework,
                self._devices,
                self._shares,
                record.plan_samples_per_second,
                socket.gethostname(),
                pid,
                start_ticks(pid) or 0,
                restart_reason(),
            )
        )

    def _note_speed(self, record: LiveRecord) -> None:
        """Steps/s since the last line of them; the first report only starts the clock."""
        earlier, self._from = self._from, record
        if earlier is not None and record.updated_at > earlier.updated_at:
            steps = (record.step - earlier.step) / (record.updated_at - earlier.updated_at)
            self._append(
                SpeedEntry(record.updated_at, record.step, steps, steps * sum(self._shares))
            )
        if record.noise is not None:
            self._append(
                NoiseEntry(record.updated_at, record.step, sum(self._shares), record.noise)
            )

    def _append(self, entry: TrainingEntry) -> None:
        content = msgspec.json.encode(entry) + b"\n"
        try:
            os.write(self._descriptor, content)
        except OSError as error:
            warnings.warn(f"The training's journal can't be written: {error}", stacklevel=2)
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self._descriptor)
