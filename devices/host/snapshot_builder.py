"""The parts of a snapshot that every source needs: the host line, and the processes with their samples/s."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..types import (
    UNSUPPORTED,
    Device,
    DeviceSample,
    HostSample,
    ProcessSample,
    Reading,
    Snapshot,
    State,
    value,
)
from .metrics import HostMeter, ProcessReading, ProcessTable
from .training_rates import Rates, TrainingRates, rate_reading


class OnDevice(msgspec.Struct, frozen=True):
    """A process as a driver sees it on one device."""

    pid: int
    memory_bytes: Reading = UNSUPPORTED
    sm_percent: Reading = UNSUPPORTED


class SnapshotBuilder:
    """Makes a source's samples a snapshot, tick by tick; not safe in two threads at once."""

    def __init__(self, rates: TrainingRates | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.interval_seconds = 0.0  # from the tick before to this one
        self._started = clock()
        self.meter = HostMeter()
        self._book = ProcessTable()
        self._rates = rates or TrainingRates()

    def begin(self) -> float:
        """Begin a tick, and return its time by the clock."""
        now = self.clock()
        self.interval_seconds, self._started = max(0.0, now - self._started), now
        return now

    def snapshot(
        self,
        samples: Sequence[DeviceSample],
        notes: tuple[str, ...] = (),
        seen: Mapping[str, Sequence[OnDevice]] | None = None,
        driver: str = "",
        host: HostSample | None = None,
    ) -> Snapshot:
        """The tick's snapshot. `seen`: the driver's processes by device id; `host`: the machine, if read already."""
        devices, processes = self.complete(samples, seen or {})
        parents = self._parents(processes)
        return Snapshot(
            at_seconds=time.time(),
            interval_seconds=self.interval_seconds,
            devices=devices,
            processes=processes,
            host=host or self.meter.read(),
            sampling_seconds=self.clock() - self._started,
            driver=driver,
            notes=notes,
            parents=parents,
            reports=self._rates.reports,
        )

    def complete(
        self, samples: Sequence[DeviceSample], seen: Mapping[str, Sequence[OnDevice]]
    ) -> tuple[tuple[DeviceSample, ...], tuple[ProcessSample, ...]]:
        """The samples with samples/s, and a row for each process: seen by the driver, or reporting itself."""
        devices = [sample.device for sample in samples]
        pids = {identity: [each.pid for each in there] for identity, there in seen.items()}
        rates = self._rates.by_process(devices, pids)
        there = [(device, each) for device in devices for each in _on(device, seen.get(device.id, ()), rates)]
        looks = {pid: self._book.look(pid) for pid in {each.pid for _, each in there}}
        rows = []
        for device, each in there:
            tokens, padding = self._rates.tokens(each.pid)
            row = _row(device, each, looks[each.pid], rates.get((each.pid, device.id)))
            rows.append(msgspec.structs.replace(row, tokens_per_second=tokens, padding_percent=padding))
        return tuple(_with_rate(sample, rates) for sample in samples), tuple(rows)

    def _parents(self, processes: Sequence[ProcessSample]) -> tuple[ProcessSample, ...]:
        """The processes that started these and are on no device, up to their shells; evener itself is one of them."""
        pids = {each.pid for each in processes}
        found: dict[int, ProcessSample] = {}
        waiting = [each.parent_pid for each in processes]
        while waiting:
            pid = waiting.pop()
            if pid not in pids and pid not in found and not _leads_session(pid):
                found[pid] = _row(None, OnDevice(pid), self._book.look(pid), None)
                waiting.append(found[pid].parent_pid)
        self._book.forget_others((*pids, *found))
        return tuple(found.values())


def _leads_session(pid: int) -> bool:
    """True for a shell or a daemon, above which nothing belongs to a training; evener itself is neither."""
    try:
        return pid <= 1 or (os.getsid(pid) == pid and pid != os.getpid())
    except OSError:
        return True


def _on(device: Device, seen: Sequence[OnDevice], rates: Rates) -> list[OnDevice]:
    """The processes on one device: seen by its driver, or known only by their own reports."""
    known = {each.pid for each in seen}
    reported = [OnDevice(pid) for pid, identity in rates if identity == device.id and pid not in known]
    return [*seen, *reported]


def _row(
    device: Device | None, seen: OnDevice, look: ProcessReading, rate: tuple[float, float] | None
) -> ProcessSample:
    unknown = Reading(State.STALE) if look.start_time else UNSUPPORTED
    memory_bytes = seen.memory_bytes
    if device is not None and device.on_cpu and look.memory_bytes is not None:
        memory_bytes = value(look.memory_bytes)
    return ProcessSample(
        pid=seen.pid,
        start_time=look.start_time,
        user=look.user,
        device_id=device.id if device else "",
        device_label=device.label if device else "",
        memory_bytes=memory_bytes,
        sm_percent=seen.sm_percent,
        cpu_percent=unknown if look.cpu_percent is None else value(look.cpu_percent),
        command=look.command,
        samples_per_second=rate_reading([rate] if rate else []),
        parent_pid=look.parent_pid,
    )


def _with_rate(sample: DeviceSample, rates: Rates) -> DeviceSample:
    parts = [rate for (_, identity), rate in rates.items() if identity == sample.device.id]
    if not parts:
        return sample
    return msgspec.structs.replace(sample, samples_per_second=rate_reading(parts))
