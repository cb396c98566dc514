"""The vitals of one GPU by NVML: seconds held back, energy, memory and its holders."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from evener.devices.nvidia.gpu_reader import ENERGY, HARDWARE_HEAT, POWER_BRAKE, POWER_CAP, SOFTWARE_HEAT
from evener.devices.nvidia.nvml_calls import DriverGoneError, Fields, GpuGoneError, Metric
from evener.devices.nvidia.nvml_library import (
    GONE_WORDS,
    Handle,
    Library,
    driver_fault,
    error_code,
    find_handle,
    load,
    memory,
)
from evener.devices.nvidia.processes import GpuProcesses
from evener.devices.types import Reading, State
from evener.devices.vitals import Vitals

HELD_FIELDS = (SOFTWARE_HEAT, HARDWARE_HEAT, POWER_BRAKE)
HELD_BITS, CAPPED_BITS = 0x08 | 0x20 | 0x40 | 0x80, 0x04  # of the reasons' mask, for chips without the counters


class NvmlVitals:
    """The vitals of the GPU with this UUID; NVML is opened at the first reading, and again after trouble."""

    def __init__(self, uuid: str) -> None:
        self._uuid, self._nvml = uuid, load()
        self._open = False
        self._reader: GpuCounters | None = None

    def read(self, full: bool) -> Vitals:
        """One reading; it never raises for what the driver does."""
        nvml = self._nvml
        try:
            if self._reader is None:
                nvml.nvmlInit()
                self._open = True
                handle = find_handle(nvml, self._uuid)
                if handle is None:
                    raise GpuGoneError(0)
                self._reader = GpuCounters(nvml, handle)
            return self._reader.read(full)
        except GpuGoneError as gone:
            words = GONE_WORDS.get(gone.code, "The driver no longer lists this GPU.")
        except DriverGoneError:
            words = "The NVIDIA driver was unloaded or replaced."
        except nvml.NVMLError as error:
            words = GONE_WORDS.get(error_code(error)) or driver_fault(error).message
        self.close()
        return Vitals(time.monotonic(), trouble=words)

    def close(self) -> None:
        """Shut NVML down."""
        self._reader = None
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


class GpuCounters:
    """The calls behind a reading: one batch of counters; memory and processes in a full one."""

    def __init__(self, nvml: Library, handle: Handle) -> None:
        self._nvml, self._handle = nvml, handle
        self._fields = Fields(nvml, handle, [*HELD_FIELDS, POWER_CAP, ENERGY])
        self._reasons = Metric(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        self._mask, self._mask_at = 0, time.monotonic()
        self._held = self._capped = 0.0
        self._power = Metric(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        self._joules, self._watts, self._watts_at = 0.0, 0.0, 0.0
        self._full = Vitals()  # the last full reading

    def read(self, full: bool) -> Vitals:
        """One reading; GpuGoneError or DriverGoneError if there is nothing left to ask."""
        now = time.monotonic()
        counters = dict(self._fields.read(now))
        energy = counters.pop(ENERGY)
        held, capped = self._slowed(now, counters)
        if full:
            self._full = self._read_full(now)
        joules, last = self._used_joules(now, energy), self._full
        return Vitals(now, held, capped, last.used_bytes, last.processes, last.busy_percent, joules)

    def _used_joules(self, now: float, counted: Reading) -> float | None:
        """Joules by the counter; a chip without one drew the mean of two readings of its power between them."""
        if counted.state is not State.UNSUPPORTED:
            return None if counted.current is None else counted.current / 1000
        watts = self._power.read_one(now).current
        if watts is None:
            return None
        if self._watts_at:
            self._joules += (self._watts + watts) / 2 * (now - self._watts_at)
        self._watts, self._watts_at = watts, now
        return self._joules

    def _slowed(self, now: float, found: Mapping[int, Reading]) -> tuple[float | None, float | None]:
        """Seconds held back and capped by the driver's nanosecond counters, else by the mask at each reading."""
        counts = {field: reading.current / 1e9 for field, reading in found.items() if reading.current is not None}
        if counts:
            held = [counts[field] for field in HELD_FIELDS if field in counts]
            return (max(held) if held else None), counts.get(POWER_CAP)
        if any(reading.state is not State.UNSUPPORTED for reading in found.values()):
            return None, None  # it has the counters, but doesn't answer just now
        return self._estimate_slowed(now)

    def _estimate_slowed(self, now: float) -> tuple[float | None, float | None]:
        """Seconds held back and capped where the mean of two readings' masks counts for the time between."""
        reasons = self._reasons.read_one(now).current
        if reasons is None:
            return None, None
        mask, elapsed = int(reasons), now - self._mask_at
        self._held += elapsed * (bool(mask & HELD_BITS) + bool(self._mask & HELD_BITS)) / 2
        self._capped += elapsed * (bool(mask & CAPPED_BITS) + bool(self._mask & CAPPED_BITS)) / 2
        self._mask, self._mask_at = mask, now
        return self._held, self._capped

    def _read_full(self, now: float) -> Vitals:
        """Bytes in use by everybody and by each process that the driver names, and the load."""
        nvml, used, percent = self._nvml, None, None
        with suppress(nvml.NVMLError):
            percent = float(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        with suppress(nvml.NVMLError):
            _, used = memory(nvml, self._handle)
        sizes = {each.pid: each.memory_bytes.current for each in GpuProcesses(nvml, self._handle, False).read(now)}
        processes = {pid: None if size is None else int(size) for pid, size in sizes.items()}
        return Vitals(used_bytes=used, processes=processes, busy_percent=percent)
