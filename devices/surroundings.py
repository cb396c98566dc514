"""What every source shows beside its devices: the host line, and the processes with their samples/s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from devices.base import UNSUPPORTED, Device, DeviceSample, HostSample, ProcessSample, Reading, State, value
from devices.host import HostMeter, ProcessBook
from devices.trainings import TrainingRates, rate_reading


class OnDevice(msgspec.Struct, frozen=True):
    """A process as a driver sees it on one device."""

    pid: int
    memory_bytes: Reading = UNSUPPORTED
    sm_percent: Reading = UNSUPPORTED


class Surroundings:
    """Shared by the sources; not safe in two threads at once."""

    def __init__(self, rates: TrainingRates | None = None) -> None:
        self._meter = HostMeter()
        self._book = ProcessBook()
        self._rates = rates or TrainingRates()

    @property
    def by_cpu(self) -> Mapping[int, float]:
        """Busy share of each logical CPU, as of the last host line; empty before the second."""
        return self._meter.by_cpu

    def host(self) -> HostSample:
        """The machine now."""
        return self._meter.read()

    def complete(
        self, samples: Sequence[DeviceSample], seen: Mapping[str, Sequence[OnDevice]]
    ) -> tuple[tuple[DeviceSample, ...], tuple[ProcessSample, ...]]:
        """The samples with samples/s, and a row for each process: seen by the driver, or reporting itself."""
        devices = [sample.device for sample in samples]
        rates = self._rates.by_process(devices, {key: [each.pid for each in on] for key, on in seen.items()})
        rows = tuple(row for device in devices for row in self._rows(device, seen.get(device.id, ()), rates))
        self._book.forget_others(row.pid for row in rows)
        return tuple(_with_rate(sample, rates) for sample in samples), rows

    def _rows(
        self, device: Device, seen: Sequence[OnDevice], rates: Mapping[tuple[int, str], tuple[float, float]]
    ) -> list[ProcessSample]:
        known = {each.pid for each in seen}
        reported = [OnDevice(pid) for pid, identity in rates if identity == device.id and pid not in known]
        return [self._row(device, each, rates.get((each.pid, device.id))) for each in (*seen, *reported)]

    def _row(self, device: Device, seen: OnDevice, rate: tuple[float, float] | None) -> ProcessSample:
        percent = self._book.cpu_percent(seen.pid)
        facts = self._book.facts(seen.pid)
        unknown = Reading(State.STALE) if facts.start_time else UNSUPPORTED
        return ProcessSample(
            pid=seen.pid,
            start_time=facts.start_time,
            user=facts.user,
            device_id=device.id,
            device_label=device.label,
            memory_bytes=seen.memory_bytes,
            sm_percent=seen.sm_percent,
            cpu_percent=unknown if percent is None else value(percent),
            command=facts.command,
            samples_per_second=rate_reading([rate] if rate else []),
        )


def _with_rate(sample: DeviceSample, rates: Mapping[tuple[int, str], tuple[float, float]]) -> DeviceSample:
    parts = [rate for (_, identity), rate in rates.items() if identity == sample.device.id]
    if not parts:
        return sample
    return msgspec.structs.replace(sample, samples_per_second=rate_reading(parts))
