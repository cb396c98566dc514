"""Samples slices of the CPU: how busy their cores are, and the machine's memory, heat and clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ..host.snapshot_builder import SnapshotBuilder
from ..types import UNSUPPORTED, Device, DeviceSample, HostSample, Reading, Snapshot, State, value

SLOW_PERIOD_SECONDS = 5.0  # heat and clock: reading them may wake cores
SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
CPUS = Path("/sys/devices/system/cpu")


class CpuSource:
    """A Source over slices; memory is the machine's, which the slices share."""

    def __init__(
        self,
        devices: Sequence[Device],
        builder: SnapshotBuilder | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._devices, self._notes = tuple(devices), notes
        self._builder = builder or SnapshotBuilder()
        self._slow_due = 0.0
        self._heat: tuple[Reading, Reading] = (UNSUPPORTED, UNSUPPORTED)
        self._clocks: dict[str, tuple[Reading, Reading]] = {}

    def devices(self) -> tuple[Device, ...]:
        """The slices, in order."""
        return self._devices

    def sample(self) -> Snapshot:
        """All slices now."""
        started = self._builder.begin()
        host = self._builder.meter.read()
        if started >= self._slow_due:
            self._slow_due = started + SLOW_PERIOD_SECONDS
            self._heat = read_heat()
            self._clocks = {device.id: read_clock(device.cores) for device in self._devices}
        samples = [self._sample(device, host) for device in self._devices]
        return self._builder.snapshot(samples, self._notes, host=host)

    def close(self) -> None:
        """Do nothing: this source holds nothing open."""

    def _sample(self, device: Device, host: HostSample) -> DeviceSample:
        by_cpu = self._builder.meter.by_cpu
        busy = [by_cpu[core] for core in device.cores if core in by_cpu]
        clock, clock_max = self._clocks.get(device.id, (UNSUPPORTED, UNSUPPORTED))
        return DeviceSample(
            device=device,
            utilization_percent=value(sum(busy) / len(busy)) if busy else Reading(State.STALE),
            memory_used_bytes=value(host.memory_used_bytes),
            memory_total_bytes=value(host.memory_total_bytes),
            temperature_celsius=self._heat[0],
            temperature_limit_celsius=self._heat[1],
            clock_mhz=clock,
            clock_max_mhz=clock_max,
        )


def read_heat() -> tuple[Reading, Reading]:
    """The hottest sensor of the processor and where it slows itself down, in °C."""
    sensors: dict[str, list[Any]] = {}
    with suppress(OSError, AttributeError, RuntimeError):
        sensors = psutil.sensors_temperatures()
    for name in SENSORS:
        if sensors.get(name):
            hottest = max(sensors[name], key=lambda sensor: sensor.current)
            return value(hottest.current), value(hottest.high) if hottest.high else UNSUPPORTED
    return UNSUPPORTED, UNSUPPORTED


def read_clock(cores: Sequence[int]) -> tuple[Reading, Reading]:
    """The clock of the slice's first core and its highest, in MHz."""
    found: list[Reading] = []
    for name in ("scaling_cur_freq", "cpuinfo_max_freq"):
        reading = UNSUPPORTED
        with suppress(OSError, ValueError, IndexError):
            reading = value(int((CPUS / f"cpu{cores[0]}" / "cpufreq" / name).read_text()) / 1000)
        found.append(reading)
    return found[0], found[1]
