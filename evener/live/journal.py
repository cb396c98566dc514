"""The journal of a training run: its speed, share changes, restarts and end.

The journal is a file of JSON lines. The first rank writes it if `evener launch` started the run or
the script asks for it. After a restart, the run continues the same file. A line is written
completely or not at all. While the file can't be written, entries are kept in memory for later, and
a warning is issued once.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Literal

import msgspec

from ..errors import RequestError
from ..system.core_speed import CoreSpeed, numpy_version
from ..system.files import new_run_id, runs_folder, trusted_folder
from ..training.launched import launched_run, restart_reason
from ..training.noise_scale import NoiseScale
from ..training.step_sums import StepSums
from .files import LONGEST_TEXT, Count, LiveRecord, Rate, ShareChange, start_ticks

At = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # Unix time in seconds

TRAINING_JOURNAL = "training.jsonl"
SPEED_SECONDS = 30.0  # seconds between two lines of steps/s
WINDOW_SECONDS = 1.0  # minimum window of steps in seconds
WINDOW_PART = 0.01  # minimum window as a fraction of the elapsed time
# maximum number of entries stored while the disk is full; the oldest are dropped
MOST_UNWRITTEN = 1024
CHUNK_BYTES = 64 << 10  # bytes read at once to find the end of the last complete line


class StartEntry(msgspec.Struct, frozen=True, tag="started", tag_field="entry"):
    """Journal entry: training has started or restarted."""

    at: At
    workload: str
    framework: str
    devices: tuple[str, ...]  # of each rank
    shares: tuple[Count, ...]
    plan_samples_per_second: Rate  # from the plan; 0: no plan
    host: str
    pid: int  # of the first rank
    ticks: int  # its start in clock ticks since boot
    reason: str = ""  # why the launcher restarted it
    product: str = ""  # what computes the core's product, such as "numpy 2.3.1"; empty: unknown
    plan_created: str = ""  # the plan's creation time, which identifies it; empty: no plan


class SpeedEntry(msgspec.Struct, frozen=True, tag="speed", tag_field="entry"):
    """Journal entry: the speed since the previous entry of this kind."""

    at: At
    step: Count  # since the processes began
    steps_per_second: Rate
    samples_per_second: Rate  # of all devices
    # medians of the first rank's steps; 0: unknown
    step_s: Rate = 0.0
    input_s: Rate = 0.0
    waiting_s: Rate = 0.0  # waiting for the other ranks
    between_s: Rate = 0.0  # between the backward pass and the next batch


class StepsEntry(msgspec.Struct, frozen=True, tag="steps", tag_field="entry"):
    """Journal entry: a window of consecutive steps, and how the first rank spent its time."""

    at: At  # end of the window
    steps: Count
    seconds: Rate  # wall-clock time
    samples: Count  # of all devices
    sums: StepSums = StepSums()  # sums over the steps that the first rank timed
    quick_s: Rate = 0.0  # 5th percentile of its step times; 0: unknown
    core_s: Rate = 0.0  # time of a fixed product on its core (system/core_speed.py); 0: unknown


class ChangeEntry(msgspec.Struct, frozen=True, tag="changed", tag_field="entry"):
    """Journal entry: a change of the shares."""

    change: ShareChange


class RetreatEntry(msgspec.Struct, frozen=True, tag="retreated", tag_field="entry"):
    """Journal entry: a pass ran out of memory, and was computed again in smaller passes."""

    at: At
    line: str  # names the device, the step, the rows before and after, and the seconds it took


class NoiseEntry(msgspec.Struct, frozen=True, tag="noise", tag_field="entry"):
    """Journal entry: the gradient noise scale after a number of steps."""

    at: At
    step: Count  # since the processes began
    batch: Count  # rows per step
    scale: NoiseScale


class EndEntry(msgspec.Struct, frozen=True, tag="ended", tag_field="entry"):
    """Journal entry: training has ended, with the exception if it failed.

    There is no such entry if the run was killed or ended by Ctrl-C.
    """

    at: At
    failure: str = ""  # the exception's class and first line; empty: finished


TrainingEntry = (
    StartEntry | SpeedEntry | StepsEntry | ChangeEntry | RetreatEntry | NoiseEntry | EndEntry
)
TrainingState = Literal["running", "finished", "stopped", "failed"]


class RecordedTraining(msgspec.Struct, frozen=True):
    """A training run, as its journal describes it."""

    run: str
    entries: tuple[TrainingEntry, ...]

    @property
    def start(self) -> StartEntry:
        """The latest start or restart of training."""
        return next(entry for entry in reversed(self.entries) if isinstance(entry, StartEntry))

    @property
    def state(self) -> TrainingState:
        """The state of the run: "running", "finished", "stopped" or "failed".

        A run whose end isn't in the journal is "running" while the first rank's process exists on
        this host, and otherwise "stopped".
        """
        last = self.entries[-1]
        start = self.start
        if isinstance(last, EndEntry):
            return "failed" if last.failure else "finished"
        is_here = start.host == socket.gethostname()
        return "running" if is_here and start_ticks(start.pid) == start.ticks else "stopped"

    @property
    def failure(self) -> str:
        """The exception that ended training, or "" if there was none."""
        last = self.entries[-1]
        return last.failure if isinstance(last, EndEntry) else ""

    @property
    def began_at(self) -> float:
        """Unix time of the first start in seconds, or 0 if it is unknown."""
        first = self.entries[0]
        return first.at if isinstance(first, StartEntry) else 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last entry, or until now while training runs."""
        times = [entry.at for entry in self.entries if not isinstance(entry, ChangeEntry)]
        return (time.time() if self.state == "running" else times[-1]) - self.began_at

    @property
    def samples_per_second(self) -> float | None:
        """The last speed in the journal, or None if there is none."""
        speeds = (
            entry.samples_per_second
            for entry in reversed(self.entries)
            if isinstance(entry, SpeedEntry)
        )
        return next(speeds, None)


class TrainingJournal:
    """Writes the journal of a training run. Only the first rank has one.

    `devices` and `shares` have an item for each rank. `plan_created` is the time at which the plan
    was created, or "" if there is no plan. If the file can't be written, a warning is issued, and
    entries are kept in memory and written later.
    """

    def __init__(
        self, devices: Sequence[str], shares: Sequence[int], plan_created: str = ""
    ) -> None:
        self._devices = tuple(devices)
        self._plan_created = plan_created
        self._shares = tuple(shares)
        self._run = launched_run() or new_run_id()
        self._descriptor = -1
        self._began = False
        self._unwritten: list[TrainingEntry] = []
        self._fails = False  # the last entry couldn't be written
        self._last: LiveRecord | None = None
        self._from: LiveRecord | None = None  # the record from which the next steps/s are computed
        self._first_s = 0.0  # the time from which windows of steps are counted
        # the start of the current window: number of steps, time, and the first rank's sums
        self._window: tuple[int, float, StepSums] | None = None
        self._core = CoreSpeed()
        self._changes: set[ShareChange] = set()
        self._noted: list[ChangeEntry | RetreatEntry | StepsEntry] = []  # entries not yet written

    def note_record(self, record: LiveRecord) -> None:
        """Write what is new in a record: changes of shares and, every 30 seconds, the speed.

        The first call also writes the entry for the start of training.
        """
        if not self._began:
            self._begin(record)
        self._last = record
        for change in record.changes:
            self.note_change(change)
        self._write_noted()
        if self._from is None or record.updated_at >= self._from.updated_at + SPEED_SECONDS:
            self._note_speed(record)

    def count(
        self,
        step: int,
        at_s: float,
        sums: Callable[[], StepSums],
        fast_step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Count the training steps up to number `step`.

        At the end of a window of steps, store an entry for the window. It is written to the file
        when the next record is noted. `at_s` is when the last step ended, in seconds of the
        monotonic clock. `sums` returns the total times of the first rank's steps. `fast_step`
        returns a low percentile of the step times since its last call, in seconds.
        """
        # entries stay in memory until the next report, because writing may be slow
        self._core.sample(at_s)
        if self._window is None:
            self._first_s = at_s
            self._window = (step, at_s, sums())
            fast_step()
            return
        if at_s < self.window_ends_at:
            return
        begun, begun_s, before = self._window
        seconds = at_s - begun_s
        now = sums()
        self._window = (step, at_s, now)
        steps = step - begun
        samples = steps * sum(self._shares)
        sums_s = now.minus(before)
        self._noted.append(
            StepsEntry(time.time(), steps, seconds, samples, sums_s, fast_step(), self._core.take())
        )
        if len(self._noted) > MOST_UNWRITTEN:
            del self._noted[0]

    @property
    def window_ends_at(self) -> float:
        """When the current window of steps may end, in seconds of the monotonic clock.

        It is -inf before the first window.
        """
        if self._window is None:
            return -math.inf
        begun_s = self._window[1]
        # the time at which the window is the fraction WINDOW_PART of the elapsed time
        long_s = (begun_s - WINDOW_PART * self._first_s) / (1 - WINDOW_PART)
        return max(begun_s + WINDOW_SECONDS, long_s)

    @property
    def due_at(self) -> float:
        """When `count` has to be called next, in seconds of the monotonic clock.

        At that time, a window of steps ends or the CPU's speed has to be measured.
        """
        return min(self.window_ends_at, self._core.due_at)

    def note_change(self, change: ShareChange) -> None:
        """Write a change of shares, unless it was already written."""
        if change not in self._changes:
            self._changes.add(change)
            self._noted.append(ChangeEntry(change))
            self._write_noted()

    def note_retreat(self, line: str) -> None:
        """Store a line about a pass that ran out of memory, for the next write."""
        self._noted.append(RetreatEntry(time.time(), line[:LONGEST_TEXT]))

    def _write_noted(self) -> None:
        """Write the stored entries, if the journal has been started."""
        if not self._began:
            return
        for entry in self._noted:
            self._append(entry)
        self._noted = []

    def close(self) -> None:
        """Write the last entries and the end of training, and close the file."""
        # a run that was interrupted by Ctrl-C counts as stopped and has no end
        if not self._began or self._last is None:
            return
        self._write_noted()
        self._note_speed(self._last)
        error = getattr(sys, "last_value", None)
        if not isinstance(error, KeyboardInterrupt):
            first, *_ = str(error).splitlines() or [""]
            self._append(
                EndEntry(time.time(), f"{type(error).__name__}: {first[:200]}" if error else "")
            )
        if self._unwritten:  # for example, a start that Ctrl-C interrupted
            self._flush()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._began = False
        self._window = None
        self._unwritten = []

    def _begin(self, record: LiveRecord) -> None:
        self._began = True
        self._from = None
        pid = os.getpid()
        self._append(
            StartEntry(
                record.updated_at,
                record.workload or os.path.basename(sys.argv[0]),
                record.framework,
                self._devices,
                self._shares,
                record.plan_samples_per_second,
                socket.gethostname(),
                pid,
                start_ticks(pid) or 0,
                restart_reason(),
                numpy_version(),
                self._plan_created,
            )
        )

    def _note_speed(self, record: LiveRecord) -> None:
        """Write the speed since the last speed entry, and the noise scale if it is known."""
        # the first report only marks the start of the measured time
        earlier = self._from
        self._from = record
        if earlier is not None and record.updated_at > earlier.updated_at:
            steps = (record.step - earlier.step) / (record.updated_at - earlier.updated_at)
            self._append(
                SpeedEntry(
                    record.updated_at,
                    record.step,
                    steps,
                    steps * sum(self._shares),
                    record.step_s,
                    record.input_s,
                    record.devices[0].waiting_s if record.devices else 0.0,
                    record.between_s,
                )
            )
        if record.noise is not None:
            self._append(
                NoiseEntry(record.updated_at, record.step, sum(self._shares), record.noise)
            )

    def _append(self, entry: TrainingEntry) -> None:
        """Write an entry after all entries that couldn't be written yet."""
        # if there are too many unwritten entries, the oldest is dropped, but never the start
        self._unwritten.append(entry)
        if len(self._unwritten) > MOST_UNWRITTEN:
            oldest = 1 if isinstance(self._unwritten[0], StartEntry) else 0
            del self._unwritten[oldest]
        self._flush()

    def _flush(self) -> None:
        """Write all unwritten entries. If that fails, warn and keep them for later."""
        try:
            if self._descriptor < 0:
                self._descriptor = _open_journal(self._run)
            elif self._fails:
                _cut_incomplete_line(self._descriptor)
            while self._unwritten:
                _write_whole(self._descriptor, msgspec.json.encode(self._unwritten[0]) + b"\n")
                del self._unwritten[0]
            self._fails = False
        except (OSError, RequestError) as error:
            if not self._fails:
                warnings.warn(f"The training's journal can't be written: {error}", stacklevel=2)
            self._fails = True


def _open_journal(run: str) -> int:
    """Open a run's journal for appending, and cut off an incomplete last line.

    Raises OSError if it isn't a regular file.
    """
    # a kill or a full disk may have left an incomplete last line
    path = trusted_folder(runs_folder() / run) / TRAINING_JOURNAL
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a plain file")
        _cut_incomplete_line(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _cut_incomplete_line(descriptor: int) -> None:
    """Truncate a file after its last newline."""
    size = os.fstat(descriptor).st_size
    whole = size
    while whole > 0:
        start = max(0, whole - CHUNK_BYTES)
        newline = os.pread(descriptor, whole - start, start).rfind(b"\n")
        if newline >= 0:
            whole = start + newline + 1
            break
        whole = start
    if whole < size:
        os.ftruncate(descriptor, whole)


def _write_whole(descriptor: int, line: bytes) -> None:
    """Append a line to a file completely or not at all.

    Raises OSError if it can't be written.
    """
    before = os.fstat(descriptor).st_size
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, before)
        raise
