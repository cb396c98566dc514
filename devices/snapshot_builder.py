"""Build snapshots of devices, processes and the throughput of training runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from evener.live.files import LiveDevice, Training, read_trainings

from .processes import HostMeter, ProcessReading, ProcessTable
from .registry import find_backend
from .types import (
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


class DeviceUse(msgspec.Struct, frozen=True):
    """How much a process uses a device, as the driver reports it."""

    pid: int
    memory_bytes: Reading = UNSUPPORTED
    sm_percent: Reading = UNSUPPORTED


class SnapshotBuilder:
    """Builds snapshots from readings of devices, processes and reports of training runs.

    Not thread-safe.
    """

    def __init__(
        self, rates: TrainingRates | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.interval_seconds = 0.0  # from the previous tick to this one
        self._started = clock()
        self.meter = HostMeter()
        self._book = ProcessTable()
        self._rates = rates or TrainingRates()

    def begin(self) -> float:
        """Begin a new snapshot, and return its time in seconds of the monotonic clock."""
        now = self.clock()
        self.interval_seconds = max(0.0, now - self._started)
        self._started = now
        return now

    def snapshot(
        self,
        samples: Sequence[DeviceSample],
        notes: tuple[str, ...] = (),
        uses: Mapping[str, Sequence[DeviceUse]] | None = None,
        driver: str = "",
        host: HostSample | None = None,
    ) -> Snapshot:
        """Return the snapshot that was started by `begin`, from the samples of its devices.

        `uses` maps device ids to the processes that the driver reports. If `host` is None, the
        host's load is measured here.
        """
        devices, processes = self.complete(samples, uses or {})
        self._book.forget_others(process.pid for process in processes)
        return Snapshot(
            at_seconds=time.time(),
            interval_seconds=self.interval_seconds,
            devices=devices,
            processes=processes,
            host=host or self.meter.read(),
            sampling_seconds=self.clock() - self._started,
            driver=driver,
            notes=notes,
            reports=self._rates.reports,
        )

    def complete(
        self, samples: Sequence[DeviceSample], uses: Mapping[str, Sequence[DeviceUse]]
    ) -> tuple[tuple[DeviceSample, ...], tuple[ProcessSample, ...]]:
        """Add the throughput of training runs to the samples, and list each device's processes."""
        devices = [sample.device for sample in samples]
        pids = {identity: [each.pid for each in there] for identity, there in uses.items()}
        rates = self._rates.by_process(devices, pids)
        there = [
            (device, each)
            for device in devices
            for each in _list_processes_on(device, uses.get(device.id, ()), rates)
        ]
        looks = {pid: self._book.look(pid) for pid in {each.pid for _, each in there}}
        rows = []
        for device, each in there:
            tokens, padding = self._rates.tokens(each.pid)
            row = _row(device, each, looks[each.pid], rates.get((each.pid, device.id)))
            rows.append(
                msgspec.structs.replace(row, tokens_per_second=tokens, padding_percent=padding)
            )
        return tuple(_with_rate(sample, rates) for sample in samples), tuple(rows)


def _list_processes_on(device: Device, uses: Sequence[DeviceUse], rates: Rates) -> list[DeviceUse]:
    """Return the processes on a device, both from the driver and from reports of training runs."""
    known = {each.pid for each in uses}
    reported = [pid for pid, identity in rates if identity == device.id]
    return [*uses, *(DeviceUse(pid) for pid in reported if pid not in known)]


def _row(
    device: Device, seen: DeviceUse, look: ProcessReading, rate: tuple[float, float] | None
) -> ProcessSample:
    unknown = Reading(State.STALE) if look.start_time else UNSUPPORTED
    memory_bytes = seen.memory_bytes
    if device.on_cpu and look.memory_bytes is not None:
        memory_bytes = value(look.memory_bytes)
    return ProcessSample(
        pid=seen.pid,
        start_time=look.start_time,
        user=look.user,
        device_id=device.id,
        device_label=device.label,
        memory_bytes=memory_bytes,
        sm_percent=seen.sm_percent,
        cpu_percent=unknown if look.cpu_percent is None else value(look.cpu_percent),
        command=look.command,
        samples_per_second=rate_reading([rate] if rate else []),
        serves_others=_serves_others(device, look.command),
    )


def _serves_others(device: Device, command: str) -> bool:
    """Return True if a command is a server that runs other processes' kernels, such as MPS."""
    program, *_ = command.split(maxsplit=1) or [""]
    return program.rpartition("/")[2] in find_backend(device.kind).server_programs


def _with_rate(sample: DeviceSample, rates: Rates) -> DeviceSample:
    parts = [rate for (_, identity), rate in rates.items() if identity == sample.device.id]
    if not parts:
        return sample
    return msgspec.structs.replace(sample, samples_per_second=rate_reading(parts))


READ_PERIOD_SECONDS = 0.5  # training processes don't write reports more often
OLD_SECONDS = 5.0  # a report is out of date once the next one has been due for this long

# (pid, device id) -> (samples/s, seconds overdue)
Rates = dict[tuple[int, str], tuple[float, float]]


class TrainingRates:
    """Reads the reports of running training processes, and assigns their throughput to devices.

    `read` returns the reports. It is called at most every 0.5 seconds.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Training]] = read_trainings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._next_read = -1.0
        self._trainings: Sequence[Training] = ()
        # ranks that have ended, of training runs with ranks that still run
        self._ended: Sequence[Training] = ()
        # all reports, with the device ids of the last call of `by_process`
        self.reports: tuple[Training, ...] = ()

    def by_process(self, devices: Sequence[Device], pids: Mapping[str, Sequence[int]]) -> Rates:
        """Return the samples/s of each process on each device, and how overdue its report is.

        `pids` maps device ids to the processes that the driver sees on the device. They are used if
        a report doesn't name its devices. The result maps pairs of process id and device id to
        pairs of samples/s and seconds overdue.
        """
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_PERIOD_SECONDS
            self._refresh()
        rates: Rates = {}
        now = time.time()
        here = {device.id for device in devices}
        placed = [_with_local_ids(training, devices, pids) for training in self._trainings]
        for training in placed:
            age = training.late_seconds(now)
            for live in training.devices:
                if live.id in here:
                    earlier, _ = rates.get((training.pid, live.id), (0.0, 0.0))
                    rates[training.pid, live.id] = (earlier + live.samples_per_second, age)
        self.reports = (
            *placed,
            *(_with_local_ids(training, devices, {}) for training in self._ended),
        )
        return rates

    def _refresh(self) -> None:
        before = (*self._trainings, *self._ended)
        self._trainings = self._read()
        going = {training.training for training in self._trainings if training.training}
        ranks = {(training.training, training.rank) for training in self._trainings}
        left = [each for each in before if (each.training, each.rank) not in ranks]
        self._ended = [each for each in left if each.training in going]

    def tokens(self, pid: int) -> tuple[Reading, Reading]:
        """Return a process's tokens/s without padding, and the padding in percent of all tokens.

        Both are from the reports that `by_process` last read. They are unsupported if there are no
        token counts, and stale if the report is more than 5 seconds overdue.
        """
        found = [each for each in self._trainings if each.pid == pid and each.tokens_per_second]
        if not found:
            return UNSUPPORTED, UNSUPPORTED
        newest = max(found, key=lambda training: training.updated_at)
        age = newest.late_seconds(time.time())
        state = State.VALUE if age <= OLD_SECONDS else State.STALE
        return Reading(state, newest.tokens_per_second, age), Reading(
            state, 100 * newest.padding, age
        )


def rate_reading(parts: Sequence[tuple[float, float]]) -> Reading:
    """Return the total of several training rates as a reading.

    `parts` contains pairs of a rate and the number of seconds that its report is overdue. Rates
    that are more than 5 seconds overdue are ignored, unless all of them are; then their sum is
    returned as a stale reading. If `parts` is empty, the reading is unsupported.
    """
    if not parts:
        return Reading(State.UNSUPPORTED)
    fresh = [(rate, age) for rate, age in parts if age <= OLD_SECONDS]
    used = fresh or parts
    state = State.VALUE if fresh else State.STALE
    return Reading(state, sum(rate for rate, _ in used), max(age for _, age in used))


def _with_device_id(live: LiveDevice, by_index: Mapping[int, Device]) -> LiveDevice:
    """Add the device id to a report that has only the index of the device."""
    if live.id or live.index not in by_index:
        return live
    return msgspec.structs.replace(live, id=by_index[live.index].id)


def _with_local_ids(
    training: Training, devices: Sequence[Device], pids: Mapping[str, Sequence[int]]
) -> Training:
    """Return a training report with the ids of this machine's devices filled in.

    A device that can't be identified keeps an empty id. If a report names no devices, its
    throughput is divided equally among the devices on which the driver sees its process.
    """
    seen = [device for device in devices if training.pid in pids.get(device.id, ())]
    if not training.devices:
        # the report names no device: divide its samples/s over the driver's devices
        rate = training.samples_per_second / max(1, len(seen))
        parts = [LiveDevice(each.id, each.index, 0, rate) for each in seen]
        return msgspec.structs.replace(training, devices=tuple(parts))
    # only an index of the framework, which doesn't count devices hidden by CUDA_VISIBLE_DEVICES
    unnamed = [live.index for live in training.devices if not live.id]
    bare = sorted({index for index in unnamed if index >= 0})
    if not bare:
        return training
    by_index = _number_devices(bare, seen, devices)
    named = [_with_device_id(live, by_index) for live in training.devices]
    return msgspec.structs.replace(training, devices=tuple(named))


def _number_devices(
    indices: Sequence[int], process_devices: Sequence[Device], devices: Sequence[Device]
) -> dict[int, Device]:
    """Return a dict that maps the device indices in a process's report to devices.

    `process_devices` are the devices on which the driver sees the process. If there are as many of
    them as indices, they are matched in ascending order. Otherwise, the indices are assumed to be
    those of the driver.
    """
    if len(indices) == len(process_devices):
        in_order = sorted(process_devices, key=lambda device: device.index)
        return dict(zip(indices, in_order, strict=True))
    accelerators = [device for device in devices if find_backend(device.kind).own_memory]
    return {device.index: device for device in accelerators}
