"""Report the training steps of this process to evener's monitor.

Reporting takes less than 0.05 % of the time. A full disk or a missing folder doesn't disturb
training.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec

from ..errors import RequestError
from ..plan.file import Share
from ..plan.layout import label_device
from ..system.taken_cores import CoreWatch, Starvation
from ..training.launched import launched_records, launched_run
from ..training.step_sums import StepSums
from .files import (
    MOST_DEVICES,
    MOST_KNOTS,
    Details,
    Doing,
    LiveDevice,
    LiveRecord,
    Training,
    clean,
    file_name,
    live_folders,
    prepare_folder,
    read_trainings,
    replace_file,
    start_ticks,
)
from .journal import TrainingJournal


class DeviceTimes(NamedTuple):
    """Typical compute and waiting times of a device in its last steps, in seconds.

    `least_waiting_s` is the first decile of the waiting times. `own_spread` isn't a time: it is the
    interquartile range of the compute times, divided by their median.
    """

    own_work_s: float = 0.0
    waiting_s: float = 0.0
    least_waiting_s: float = 0.0
    own_spread: float = 0.0


def sum_up(own_work_s: Sequence[float], waiting_s: Sequence[float]) -> DeviceTimes:
    """Return a device's typical times from the times of its last steps, all in seconds.

    `own_work_s` are its compute times in these steps, and `waiting_s` its waiting times.
    """
    return DeviceTimes(
        middle(own_work_s),
        middle(waiting_s),
        max(0.0, _lowest_tenth(waiting_s)),
        spread(own_work_s),
    )


def middle(values: Sequence[float]) -> float:
    """Return the median of values, or 0 if it is negative or there are no values."""
    return max(0.0, median(values)) if values else 0.0


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range of values divided by their median, or 0 if unknown."""
    low, half, high = quantiles(values) if len(values) > 1 else (0.0, 0.0, 0.0)
    return (high - low) / half if half > 0 else 0.0


def _lowest_tenth(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10] if values else 0.0


__all__ = ["LiveDevice", "Reporter", "Training", "live_folders", "read_trainings", "report"]

INTERVAL_SECONDS = 0.5  # between two writes
COST_LIMIT = 0.0005  # writing takes at most this fraction of the time, even on a slow disk
LONGEST_INTERVAL_SECONDS = 30.0  # between two writes, and after a failed write
WINDOW_SECONDS = 5.0  # seconds over which samples/s is averaged
FIRST_STEPS = 3  # steps left out of the totals, because they compile and allocate
KEEP_SECONDS = 2.0  # seconds between two copies of the record for the launcher
# seconds between readings of the threads' wait for cores; the last CORE_READINGS are averaged
CORE_SECONDS = 2.0
CORE_READINGS = 5
LAST_CORE_SECONDS = 0.2  # minimum time before the last reading, as the kernel counts in 10 ms
WATCH_SECONDS = 2.0  # seconds between two checks whether steps end
WATCHER = "evener-live"  # name of the checking thread
# time after the last step until the process writes its current activity
LATE_SECONDS = 2.5
LATE_STEPS = 1.5

Devices = Sequence[str | int | Share]
NO_RATES = (0.0, 0.0, 0.0)


class _Counts(NamedTuple):
    """The number of samples and tokens that had been processed at one point in time."""

    at: float  # monotonic seconds
    samples: int
    tokens: int
    padded: int


class _Cores:
    """Measures how long the threads of this process wait for a CPU core."""

    def __init__(self) -> None:
        self._watch = CoreWatch()
        self._read_at = time.monotonic()
        self._last: deque[Starvation] = deque(maxlen=CORE_READINGS)
        self._whole_s = self._starved_s = 0.0

    def read_last(self) -> None:
        """Measure once more at the end of a run."""
        # in a short run, it is the only one
        self._update(LAST_CORE_SECONDS)

    def _update(self, seconds: float) -> None:
        """Measure again, unless the last measurement is less than `seconds` seconds old."""
        now = time.monotonic()
        if now >= self._read_at + seconds:
            self._read_at = now
            seen = self._watch.read()
            self._last.append(seen)
            self._whole_s += seen.wall_s
            self._starved_s += seen.starved_s

    def read(self) -> tuple[float, float]:
        """Return the recent and the overall fraction of time that threads waited for a CPU core.

        The first value is for the last few seconds, and the second for the whole run.
        """
        self._update(CORE_SECONDS)
        wall_s = sum(each.wall_s for each in self._last)
        starved_s = sum(each.starved_s for each in self._last)
        lately = starved_s / wall_s if wall_s else 0.0
        return lately, self._starved_s / self._whole_s if self._whole_s else lately


class Reporter:
    """Counts the training steps of this process, and writes a record for the monitor.

    Records are written at most every half second, and less often if the disk is slow. A reporter
    may be used by several threads, and in a forked process.

    - `details`: returns metrics of this rank and the times of its devices.
    - `journal`: the journal that each record is also added to, if any.
    - `activity`: returns the current batch and what the process is doing. They are added to the
      record when a step takes unusually long.
    - `sums`: returns the total times of all steps, for the journal.
    - `fast_step`: returns a low percentile of recent step times in seconds, for the journal.
    """

    _serials = iter(range(1 << 29))

    def __init__(
        self,
        details: Callable[[], tuple[Details, Sequence[DeviceTimes]]] = lambda: (Details(), ()),
        journal: TrainingJournal | None = None,
        activity: Callable[[], tuple[int, Doing]] | None = None,
        sums: Callable[[], StepSums] = StepSums,
        fast_step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._serial = next(self._serials)
        self._details = details
        self._now = activity
        self._sums = sums
        self._quick = fast_step
        self._reset()
        self._journal = journal
        _reporters.add(self)
        _follow_process()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._journal = None  # a forked child leaves the journal to its parent
        self._pid = os.getpid()
        self._ticks = start_ticks(self._pid)
        self._samples = self._tokens = self._padded = 0
        self._step = 0
        self._points: deque[_Counts] = deque()
        self._reported_at = 0.0  # monotonic seconds
        self._counted_from: _Counts | None = None  # the counts after the first steps
        self._last_call: tuple[tuple[str, str], Devices, Sequence[int] | None] | None = None
        self._next_keep = 0.0
        self._has_written = False
        self._cores: _Cores | None = None  # set from the first record on
        self._next_write = 0.0
        self._next_check = 0.0  # when a counted step may have to be written, in monotonic seconds
        self._wait = INTERVAL_SECONDS  # seconds until the next write
        self._file: Path | None = None
        self._record: LiveRecord | None = None  # the record in the file
        # set to end the checking thread, if there is one
        self._ended: threading.Event | None = None

    def report(
        self,
        samples: int,
        *,
        devices: Devices | None = None,
        workload: str = "",
        framework: str = "",
        batches: Sequence[int] | None = None,
        timed: bool = True,
        tokens: tuple[int, int] = (0, 0),
    ) -> None:
        """Count a step of `samples` samples.

        - `devices`: the devices that computed it, as ids, indexes or shares of a plan.
        - `workload`, `framework`: names to show in the monitor.
        - `batches`: samples of each device; by default as in the plan.
        - `timed`: False excludes the step from all rates, for example because it compiles.
        - `tokens`: tokens of the step, without and with padding.

        Raises RequestError unless `samples` is a whole number of at least 0, or if `batches` don't
        match `devices`.
        """
        if samples.__class__ is not int or samples < 0:
            samples = _whole(samples)
        with self._lock:
            self._samples += samples
            self._tokens += tokens[0]
            self._padded += tokens[1]
            self._step += 1
            now = time.monotonic()
            if not timed:
                self._leave_out(now - self._reported_at, samples, *tokens)
            self._last_call = ((framework, workload), devices or (), batches)
            self._note_step(now)

    def count(self, samples: int, tokens: tuple[int, int] = (0, 0)) -> bool:
        """Count a step that used the same devices and names as the last report.

        This costs less time than `report`. Returns False and counts nothing if there was no report
        yet. Call it only from the thread that reports.
        """
        # without the lock, a record that another thread makes may lack the samples of this step
        if self._last_call is None:
            return False
        self._samples += samples
        self._step += 1
        if tokens[1]:
            self._tokens += tokens[0]
            self._padded += tokens[1]
        now = time.monotonic()
        if now < self._next_check:
            self._reported_at = now
            return True
        with self._lock:
            self._note_step(now)
        return True

    def _note_step(self, now: float) -> None:
        """After a step, write the record and extend the journal if they are due.

        `now` is in seconds of the monotonic clock.
        """
        self._reported_at = now
        if self._step == FIRST_STEPS:
            self._counted_from = self._count(now)
        if self._journal is not None:
            self._journal.count(self._step, now, self._sums, self._quick)
        if now >= self._next_write:
            self._next_write = now + INTERVAL_SECONDS
            if self._ticks is not None and self._last_call is not None:
                self._publish(*self._last_call, self._recent_rates(now))
        if self._step >= FIRST_STEPS:
            due_at = math.inf if self._journal is None else self._journal.due_at
            self._next_check = min(self._next_write, due_at)

    def close(self) -> None:
        """Delete the file of the live record, and finish the journal.

        If a step is reported later, a new file is written and the journal continues.
        """
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.unlink(missing_ok=True)
            if self._ended is not None:
                self._ended.set()
            self._file = self._ended = None
            self._note_end()
            self._record = None
            self._points.clear()
            if self._journal is not None:
                self._journal.close()

    def discard(self) -> None:
        """Close the reporter, and delete the copy of its record that the launcher would read.

        Use it if another reporter also reports this training run. The journal isn't deleted.
        """
        with self._lock:
            self._last_call = None
            self.close()
            kept = launched_records()
            if kept:
                with contextlib.suppress(OSError):
                    self._kept_file(kept).unlink(missing_ok=True)

    def _note_end(self) -> None:
        """Write the last steps to the journal, and to the launcher's copy of the record."""
        # they aren't in a file yet
        kept = launched_records()
        if self._last_call is None or self._ticks is None:
            return
        if self._journal is None and not kept:
            return
        call = self._last_call
        self._last_call = None
        if self._cores is not None:
            self._cores.read_last()
        with contextlib.suppress(RuntimeError):  # a device may have failed
            record = self._make_record(*call, self._recent_rates(self._reported_at) or NO_RATES)
            self._note(record)
            if kept:
                self._keep(record, kept)

    def _leave_out(self, seconds: float, *counts: int) -> None:
        """Exclude a step from the reported speeds.

        `seconds` is its duration, and `counts` are its samples and tokens.
        """
        # the step's time and samples are added to the earlier counts

        def move(then: _Counts) -> _Counts:
            return _Counts(then.at + seconds, *map(operator.add, then[1:], counts))

        self._points = deque(map(move, self._points))
        if self._counted_from is not None:
            self._counted_from = move(self._counted_from)

    def _count(self, now: float) -> _Counts:
        return _Counts(now, self._samples, self._tokens, self._padded)

    def _recent_rates(self, now: float) -> tuple[float, float, float] | None:
        """Return samples/s, tokens/s and the fraction of padding over the last few seconds.

        The first call returns None, because a rate needs two points in time.
        """
        points = self._points
        points.append(self._count(now))
        while len(points) > 2 and now - points[0].at > WINDOW_SECONDS:
            points.popleft()
        first = points[0]
        last = points[-1]
        seconds = last.at - first.at
        padded = last.padded - first.padded
        if seconds <= 0:
            return None
        tokens = last.tokens - first.tokens
        return (
            (last.samples - first.samples) / seconds,
            tokens / seconds,
            1 - tokens / padded if padded else 0.0,
        )

    def read(self) -> LiveRecord | None:
        """Return the current record, or None if there is none yet."""
        # this record may be newer than the file, if the disk is slow
        with self._lock:
            if self._record is None or self._last_call is None:
                return None
            rates = self._recent_rates(self._reported_at)
            return self._record if rates is None else self._make_record(*self._last_call, rates)

    def _publish(
        self,
        names: tuple[str, str],
        devices: Devices,
        batches: Sequence[int] | None,
        rates: tuple[float, float, float] | None,
    ) -> None:
        """Write the record to its file, to the journal, and to a copy for the launcher.

        `rates` is None if no rates are known yet; then the record is written only to the journal.
        """
        # This also schedules the next write, and starts the thread that notices steps that hang.
        if rates is None and self._journal is None:
            return
        began = time.monotonic()
        record = self._make_record(names, devices, batches, rates or NO_RATES)
        self._note(record)
        if rates is not None:
            self._write(record)
            kept = launched_records()
            if kept and began >= self._next_keep:
                self._next_keep = began + KEEP_SECONDS
                self._keep(record, kept)
            # the first write also created the folder
            took = time.monotonic() - began if self._has_written else 0.0
            self._has_written = True
            wait = took / COST_LIMIT if self._file else LONGEST_INTERVAL_SECONDS
            # as announced by `due_at` in the record
            self._next_write += self._wait - INTERVAL_SECONDS
            self._wait = min(max(wait, INTERVAL_SECONDS), LONGEST_INTERVAL_SECONDS)
            if self._now is not None and self._ended is None:
                self._ended = threading.Event()
                threading.Thread(
                    target=self._report_activity_if_late,
                    args=(self._now, self._ended),
                    name=WATCHER,
                    daemon=True,
                ).start()

    def _note(self, record: LiveRecord) -> None:
        """Add a record to the training run's journal, if it has one."""
        # a launched run in which this process reports for all devices gets a journal here
        if self._journal is None and _is_launched_alone() and not _has_journal():
            shown = [
                label_device(live.id, live.index) or f"device {live.index}"
                for live in record.devices
            ]
            self._journal = TrainingJournal(shown, [live.batch for live in record.devices])
        if self._journal is not None:
            self._journal.note_record(record)

    def _make_record(
        self,
        names: tuple[str, str],
        devices: Devices,
        batches: Sequence[int] | None,
        rates: tuple[float, float, float],
    ) -> LiveRecord:
        framework, workload = map(clean, names)
        rate, tokens_rate, padding = rates
        details, times = self._details()
        now = time.time()
        described = _describe_devices(devices, batches, rate, times)
        if self._cores is None:
            self._cores = _Cores()
        starved, starved_so_far = self._cores.read()
        more = {"due_at": now + self._wait, **msgspec.structs.asdict(details)}
        more |= {"starved": starved, "starved_so_far": starved_so_far}
        if self._counted_from is not None:
            more["counted_steps"] = self._step - FIRST_STEPS
            more["counted_samples"] = self._samples - self._counted_from.samples
            more["counted_seconds"] = self._reported_at - self._counted_from.at
        return LiveRecord(
            framework, workload, rate, self._step, now, described, tokens_rate, padding, **more
        )

    def _keep(self, record: LiveRecord, folder: Path) -> None:
        """Write a copy of the record that the launcher can read after this process has exited."""
        with contextlib.suppress(OSError):
            replace_file(self._kept_file(folder), msgspec.json.encode(record))

    def _kept_file(self, folder: Path) -> Path:
        """Return the path of the launcher's copy of the record."""
        return folder / f"{self._pid}.{self._serial}.json"

    def _write(self, record: LiveRecord) -> None:
        """Write the record to the first writable folder, and use that folder from then on."""
        # `_file` stays None if no folder is writable
        self._record = record
        content = msgspec.json.encode(record)
        last = self._file
        self._file = None
        for folder in [last.parent] if last else live_folders():
            with contextlib.suppress(OSError):
                if last is None:
                    prepare_folder(folder)
                target = folder / file_name(self._pid, self._ticks or 0, self._serial)
                replace_file(target, content)
                self._file = target
                return

    def _report_activity_if_late(
        self, activity: Callable[[], tuple[int, Doing]], ended: threading.Event
    ) -> None:
        """Write the current batch and activity into the record when a step takes unusually long.

        `activity` returns the batch and the activity. This function runs in its own thread until
        `ended` is set.
        """
        while not ended.wait(WATCH_SECONDS):
            with self._lock:
                record, (batch, doing), late = (
                    self._record,
                    activity(),
                    time.monotonic() - self._reported_at,
                )
                if (
                    ended.is_set()
                    or record is None
                    or (record.batch, record.doing) == (batch, doing)
                ):
                    continue
                if late > max(LATE_SECONDS, LATE_STEPS * record.step_s):
                    # earlier than a slow disk's schedule
                    due_at = min(record.due_at, time.time() - late)
                    self._write(
                        msgspec.structs.replace(record, batch=batch, doing=doing, due_at=due_at)
                    )


_reporters: weakref.WeakSet[Reporter] = weakref.WeakSet()
_own: Reporter | None = None


def newest_reporter() -> Reporter | None:
    """Return the reporter with the most recent step, or None if no reporter has a record."""
    reporting = [reporter for reporter in list(_reporters) if reporter._record is not None]
    return max(reporting, key=lambda each: each._reported_at, default=None)


def is_reported_elsewhere(excluded: Reporter | None) -> bool:
    """Return True if any reporter of this process, except `excluded`, has reported steps."""
    return any(
        reporter is not excluded and reporter._last_call is not None
        for reporter in list(_reporters)
    )


def report(
    samples: int,
    *,
    devices: Devices | None = None,
    workload: str = "",
    framework: str = "",
    batches: Sequence[int] | None = None,
) -> None:
    """Report a training step to evener's monitor, if you write your own training loop.

    - `samples`: samples of the step.
    - `devices`: the devices that computed it, as ids, indexes or shares of a plan.
    - `workload`, `framework`: names to show in the monitor.
    - `batches`: samples of each device; by default as in the plan, or equal parts.

    Call it after each step. Raises RequestError unless `samples` is a whole number of at least 0,
    or if `batches` don't match `devices`.
    """
    global _own
    if _own is None:
        _own = Reporter()
    _own.report(samples, devices=devices, workload=workload, framework=framework, batches=batches)


def _is_launched_alone() -> bool:
    """Return True if a launcher started this process, and no other process reports the run."""
    # Such a process is the run's only one or, in Keras, the first of its group.
    return bool(launched_run()) and os.environ.get("WORLD_SIZE", "1") == "1"


def _has_journal() -> bool:
    return any(reporter._journal is not None for reporter in _reporters)


def _describe_devices(
    devices: Devices, batches: Sequence[int] | None, rate: float, times: Sequence[DeviceTimes]
) -> tuple[LiveDevice, ...]:
    """Return the devices of a report, each with its part of the throughput and its times.

    `batches` are the samples of each device, or None to use those that `devices` contains. `rate`
    is the samples/s of all devices together; it is divided in proportion to the devices' samples.
    Raises RequestError if the number of batches differs from the number of devices.
    """
    named = [_identify_device(device) for device in devices]
    sizes = (
        [device.batch for device in named]
        if batches is None
        else [_whole(size) for size in batches]
    )
    if len(sizes) != len(named):
        raise RequestError(
            f"A report names {len(named)} devices and {len(sizes)} batches.",
            "Give one batch for each device.",
        )
    total = sum(sizes)
    times = (*times, *[DeviceTimes()] * (len(named) - len(times)))
    return tuple(
        msgspec.structs.replace(
            device,
            batch=size,
            samples_per_second=rate * (size / total if total else 1 / len(named)),
            curve=device.curve if spent.own_work_s else (),
            **spent._asdict(),
        )
        for device, size, spent in zip(named, sizes, times, strict=True)
        if size or not total
    )[:MOST_DEVICES]


def _identify_device(device: str | int | Share) -> LiveDevice:
    """Return the entry for a device that is given as an id, an index or a share of a plan."""
    # a plan's share also has the samples per step and per pass, the curve and the limit
    if isinstance(device, Share):
        index = max(-1, device.index)
        host = clean(device.host)
        curve = device.curve if len(device.curve) <= MOST_KNOTS else ()
        return LiveDevice(
            clean(device.device),
            index,
            device.batch,
            0.0,
            device.micro,
            host=host,
            curve=curve,
            most=device.most,
        )
    if isinstance(device, int):
        return LiveDevice("", max(-1, device), 0, 0.0)
    return LiveDevice(clean(device), -1, 0, 0.0)


def _whole(samples: object) -> int:
    try:
        number = operator.index(samples)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(samples, bool) or number < 0:
        raise RequestError(
            f"A report of {samples!r} samples isn't a count.", "Give the step's samples, 0 or more."
        )
    return number


def _reset_all() -> None:
    """Reset all reporters after a fork, in the child process."""
    # the parent's files aren't touched
    for reporter in list(_reporters):
        reporter._reset()


def _close_all() -> None:
    for reporter in list(_reporters):
        reporter.close()


@cache
def _follow_process() -> None:
    """Register functions that run when this process forks or exits. They handle all reporters."""
    os.register_at_fork(after_in_child=_reset_all)
    atexit.register(_close_all)
