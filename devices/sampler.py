"""Read devices at a fixed interval in a background thread, and keep a history of the readings."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from .discover import discover, open_source
from .registry import find_backend
from .simulated import SimulatedSource
from .types import Device, DeviceSample, ProcessSample, Reading, Snapshot, Source, State

Subscriber = Callable[[Snapshot], object]
HISTORY_TICKS = 600
SHORTEST_INTERVAL_SECONDS = 0.1
OVERDUE_INTERVALS = 2.5  # a tick this late makes the last snapshot stale
JOIN_SECONDS = 2.0
_READINGS = tuple(
    field.name
    for field in msgspec.structs.fields(DeviceSample)
    if isinstance(field.default, Reading)
)
Sample = TypeVar("Sample", DeviceSample, ProcessSample)
log = logging.getLogger(__name__)


class Sampler:
    """Reads a source at a fixed interval in a background thread, and keeps a history.

    Each snapshot is passed to a subscriber, which is never called by two threads at the same time.
    While the source doesn't answer, the last snapshot is passed on, marked as stale. Raises
    `ValueError` if the interval is below 0.1 seconds.
    """

    def __init__(self, source: Source, interval_seconds: float = 1.0) -> None:
        if not interval_seconds >= SHORTEST_INTERVAL_SECONDS:
            raise ValueError(
                f"an interval of {interval_seconds} s is below {SHORTEST_INTERVAL_SECONDS} s"
            )
        self.source = source
        self.interval_seconds = interval_seconds
        self._history = History(HISTORY_TICKS)
        self._subscriber: Subscriber = lambda _: None
        # protects the fields below and the history; never held while the source or subscriber runs
        self._lock = threading.Lock()
        self._notifying = threading.Lock()  # one call at a time
        self._stop = threading.Event()
        self._last: Snapshot | None = None
        self._sampled_at = time.monotonic()
        self._threads = (
            threading.Thread(target=self._poll, name="evener-sampler", daemon=True),
            threading.Thread(target=self._watch, name="evener-sampler-watch", daemon=True),
        )

    def set_loads(self, loads: Mapping[str, tuple[float | None, int]]) -> None:
        """Set the load of simulated devices. Real devices aren't affected.

        `loads` maps device ids to the device's samples/s and its rows per gradient-accumulation
        pass. If the samples/s are None, the device works without pauses. Devices that aren't in
        `loads` become idle.
        """
        if isinstance(self.source, SimulatedSource):
            for position, device in enumerate(self.source.devices()):
                self.source.set_load(position, *loads.get(device.id, ()))

    def start(self, subscriber: Subscriber | None = None) -> None:
        """Start reading. A background thread passes each snapshot to the subscriber.

        Exceptions of the subscriber are logged. A second call only replaces the subscriber.
        """
        self._subscriber = subscriber or self._subscriber
        if self._threads[0].ident is None:
            self._sampled_at = time.monotonic()
            for thread in self._threads:
                thread.start()

    def close(self, wait_seconds: float = JOIN_SECONDS) -> bool:
        """Stop reading, and return True if the thread has ended within `wait_seconds` seconds.

        The thread closes the source when it ends. If `start` wasn't called, the source is closed
        here.
        """
        self._stop.set()
        deadline = time.monotonic() + wait_seconds
        for thread in self._threads:
            if thread.ident is None:
                self.source.close()
                return True
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not self._threads[0].is_alive()

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot, or None if there is none yet.

        If the next one is overdue, the readings are marked as stale.
        """
        with self._lock:
            last = self._last
            age = time.monotonic() - self._sampled_at
        if last is None or age <= OVERDUE_INTERVALS * self.interval_seconds:
            return last
        return mark_stale(last, age)

    def history(
        self, key: str, metric: str, newest: int = HISTORY_TICKS
    ) -> tuple[float | None, ...]:
        """Return the values of a metric in the newest snapshots, with the oldest first.

        `key` is the key of a device or the id of a training run. `metric` is a reading of
        `DeviceSample` or "noise_scale". `newest` is the maximum number of values. Missing values
        are None.
        """
        with self._lock:
            return self._history.values(key, metric, newest)

    def times(self, newest: int = HISTORY_TICKS) -> tuple[float, ...]:
        """Return the Unix times of the newest snapshots in seconds, with the oldest first.

        `newest` is the maximum number of times.
        """
        with self._lock:
            return self._history.times(newest)

    @property
    def ticks(self) -> int:
        """The number of snapshots since the start."""
        with self._lock:
            return self._history.count

    def _poll(self) -> None:
        try:
            deadline = time.monotonic()
            while not self._stop.is_set():
                self._tick()
                missed = math.floor((time.monotonic() - deadline) / self.interval_seconds)
                deadline += (missed + 1) * self.interval_seconds
                self._stop.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self.source.close()

    def _tick(self) -> None:
        try:
            snapshot = self.source.sample()
        except Exception:
            log.exception("the source failed; its last readings turn stale")
            return
        with self._lock:
            self._last = snapshot
            self._sampled_at = time.monotonic()
            self._history.add(snapshot)
        self._notify(snapshot)

    def _watch(self) -> None:
        """While the next snapshot is overdue, pass on the last one, marked as stale."""
        while not self._stop.wait(self.interval_seconds):
            latest = self.latest()
            if latest is not None and latest is not self._last:
                self._notify(latest)

    def _notify(self, snapshot: Snapshot) -> None:
        with self._notifying:
            if self._stop.is_set():
                return
            try:
                self._subscriber(snapshot)
            except Exception:
                log.exception("the subscriber failed; sampling goes on")


class History:
    """The readings of the last `ticks` snapshots, in an array for each device and metric.

    Not thread-safe.
    """

    def __init__(self, ticks: int) -> None:
        self._most = ticks
        self._columns: dict[tuple[str, str], array[float]] = {}
        self._times = array("d")
        self.count = 0  # number of ticks so far, including dropped ones

    def add(self, snapshot: Snapshot) -> None:
        """Append the readings of a snapshot."""
        before = len(self._times)
        self._times.append(snapshot.at_seconds)
        self.count += 1
        for sample in snapshot.devices:
            for name in _READINGS:
                value = getattr(sample, name).current
                if value is not None:
                    self._put(sample.device.key, name, value, before)
        for report in snapshot.reports:
            if report.noise:
                self._put(report.training, "noise_scale", report.noise.safe_rows, before)
        for column in self._columns.values():
            if len(column) == before:
                column.append(math.nan)
        if before + 1 >= 2 * self._most:
            self._forget()

    def _put(self, key: str, metric: str, value: float, before: int) -> None:
        column = self._columns.get((key, metric))
        if column is None:
            column = self._columns[key, metric] = array("d", [math.nan]) * before
        if len(column) == before:
            column.append(value)
        else:
            column[before] = value  # a second report of the same training

    def _forget(self) -> None:
        """Remove values older than the last `ticks` snapshots, and metrics without any value."""
        del self._times[: -self._most]
        for column in self._columns.values():
            del column[: -self._most]
        self._columns = {
            key: column for key, column in self._columns.items() if not all(map(math.isnan, column))
        }

    def values(
        self, key: str, metric: str, newest: int = HISTORY_TICKS
    ) -> tuple[float | None, ...]:
        """Return the newest values of a metric, with the oldest first. Missing values are None.

        `key` is the key of a device or the id of a training run. `metric` is a reading of
        `DeviceSample` or "noise_scale". `newest` is the maximum number of values.
        """
        kept = self._kept(newest)
        column = self._columns.get((key, metric))
        if column is None:
            return (None,) * kept
        return tuple([None if value != value else value for value in column[len(column) - kept :]])

    def times(self, newest: int = HISTORY_TICKS) -> tuple[float, ...]:
        """Return the Unix times of the newest snapshots in seconds, with the oldest first.

        `newest` is the maximum number of times.
        """
        kept = self._kept(newest)
        return tuple(self._times[len(self._times) - kept :])

    def _kept(self, newest: int) -> int:
        return max(0, min(newest, self._most, len(self._times)))


def mark_stale(
    snapshot: Snapshot, age_seconds: float, reason: str = "the driver does not answer"
) -> Snapshot:
    """Return a copy of a snapshot with its readings marked as stale and a message that says so.

    `age_seconds` is added to the age of each current reading. `reason` says why there is no newer
    reading.
    """
    note = f"No reading for {age_seconds:.0f} s: {reason}."
    devices = (_stale_readings(sample, age_seconds) for sample in snapshot.devices)
    return msgspec.structs.replace(
        snapshot,
        devices=tuple(
            msgspec.structs.replace(sample, note=sample.note or note) for sample in devices
        ),
        processes=tuple(_stale_readings(process, age_seconds) for process in snapshot.processes),
        notes=(*snapshot.notes, note),
    )


def _stale_readings(sample: Sample, age_seconds: float) -> Sample:
    changed = {}
    for name, reading in msgspec.structs.asdict(sample).items():
        if isinstance(reading, Reading) and reading.state is State.VALUE:
            changed[name] = reading.aged(reading.age_seconds + age_seconds, State.STALE)
    return msgspec.structs.replace(sample, **changed)


def open_sampler(devices: str, ray_address: str = "") -> tuple[Sampler, tuple[Device, ...]]:
    """Return a sampler of the requested devices, and which of them can be used for training.

    The sampler isn't started yet. Raises RequestError if the request is invalid, and DeviceError if
    the devices can't be used.
    """
    found = discover(devices, only_visible=False, ray_address=ray_address)
    return Sampler(open_source(found)), _trainable(found.devices)


def _trainable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices that aren't hidden by a variable such as CUDA_VISIBLE_DEVICES."""
    if not devices or devices[0].host:
        return devices
    # an environment variable may hide some GPUs from frameworks
    return find_backend(devices[0].kind).visible(devices, os.environ)
