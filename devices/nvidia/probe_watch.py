"""What can spoil a measurement on one GPU: it throttles, others take its memory, or its driver goes silent.

Asked between two timed blocks, on a thread of its own: a driver that hangs holds up that thread and nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

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

HELD_FIELDS = (SOFTWARE_HEAT, HARDWARE_HEAT, POWER_BRAKE)
HELD_BITS, CAPPED_BITS = 0x08 | 0x20 | 0x40 | 0x80, 0x04  # of the reasons' mask, for chips without the counters


class Vitals(msgspec.Struct, frozen=True):
    """One reading of a GPU; None for what it doesn't report. Seconds add up since the driver or the watch began."""

    at_seconds: float = 0.0  # monotonic
    held_seconds: float | None = None  # by heat, a power brake or a fault: the longest of these
    capped_seconds: float | None = None  # by its power limit
    used_bytes: int | None = None  # by everybody; read only in full readings, as are the processes
    processes: Mapping[int, int] = {}  # pid -> bytes, as far as the driver reports
    joules: float | None = None  # by the driver's energy counter, else power summed up over the readings
    trouble: str = ""  # why the GPU can't be used now, as a sentence


class GpuVitals:
    """The watch over one GPU, by its UUID. A driver that was never there is no trouble: nothing is reported then."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._nvml = load()
        self._reader: _Reader | None = None
        self._ever = False  # it has answered before: from then on silence is trouble
        self._last = Vitals()
        self._began: float | None = None  # when the thread came to ask the driver
        self._thread: threading.Thread | None = None  # one for each question
        self._closed = False

    def ask(self, full: bool = False) -> bool:
        """Ask the driver once more; False if it has not answered the question before."""
        if self.pending or self._closed:
            return False
        self._start(self._answer, full)
        return True

    def answer(self, wait_seconds: float) -> Vitals:
        """The driver's last answer, or the one before it if the last takes longer than the wait."""
        if self._thread is not None:
            self._thread.join(wait_seconds)
        return self._last

    @property
    def pending(self) -> bool:
        """Whether the driver has not answered yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def silent_seconds(self) -> float:
        """How long the driver has had for its answer; a thread that waits for a busy CPU is not silence."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End the watch; a thread that the driver holds ends when it lets go. It may be called twice."""
        if not self._closed:
            self._closed = True
            self._start(self._finish, self._thread)

    def _start(self, target: Callable[..., None], argument: object) -> None:
        thread = threading.Thread(target=target, args=(argument,), name="evener-vitals", daemon=True)
        thread.start()  # before others see it: they may join it at once
        self._thread = thread

    def _answer(self, full: bool) -> None:
        self._began = time.monotonic()
        self._last = self._look(full)
        self._began = None

    def _finish(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._leave()

    def _look(self, full: bool) -> Vitals:
        """Never raises for what the driver does."""
        nvml = self._nvml
        try:
            if self._reader is None:
                self._reader = self._open()
            return self._reader.read(full)
        except GpuGoneError as gone:
            words = GONE_WORDS.get(gone.code, "The driver no longer lists this GPU.")
        except DriverGoneError:
            words = "The NVIDIA driver was unloaded or replaced."
        except nvml.NVMLError as error:
            words = GONE_WORDS.get(error_code(error)) or driver_fault(error).message
        self._leave()
        return Vitals(time.monotonic(), trouble=words if self._ever else "")

    def _open(self) -> _Reader:
        nvml = self._nvml
        nvml.nvmlInit()
        try:
            handle = find_handle(nvml, self._uuid)
            if handle is None:
                raise GpuGoneError(0)
            reader = _Reader(nvml, handle)
            reader.read(False)
        except BaseException:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
            raise
        self._ever = True
        return reader

    def _leave(self) -> None:
        if self._reader is not None:
            self._reader = None
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


class _Reader:
    """The calls behind a reading: one batch of counters; memory and processes in a full one."""

    def __init__(self, nvml: Library, handle: Handle) -> None:
        self._nvml, self._handle = nvml, handle
        self._fields = Fields(nvml, handle, [*HELD_FIELDS, POWER_CAP, ENERGY])
        self._reasons = Metric(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        self._mask, self._mask_at = 0, time.monotonic()
        self._held = self._capped = 0.0
        self._power = Metric(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        self._joules, self._watts, self._watts_at = 0.0, 0.0, 0.0
        self._memory: tuple[int | None, Mapping[int, int]] = (None, {})

    def read(self, full: bool) -> Vitals:
        """One reading; GpuGoneError or DriverGoneError if there is nothing left to ask."""
        now = time.monotonic()
        counters = dict(self._fields.read(now))
        energy = counters.pop(ENERGY)
        held, capped = self._slowed(now, counters)
        if full:
            self._memory = self._holders(now)
        used, processes = self._memory
        return Vitals(now, held, capped, used, processes, joules=self._used_joules(now, energy))

    def _used_joules(self, now: float, counted: Reading) -> float | None:
        """By the counter; on chips without one the mean of two readings of the power counts for the time between."""
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
        """Seconds by the driver's nanosecond counters, else by the mask at each reading."""
        counts = {field: reading.current / 1e9 for field, reading in found.items() if reading.current is not None}
        if counts:
            held = [counts[field] for field in HELD_FIELDS if field in counts]
            return (max(held) if held else None), counts.get(POWER_CAP)
        if any(reading.state is not State.UNSUPPORTED for reading in found.values()):
            return None, None  # it has the counters, but doesn't answer just now
        return self._estimate_slowed(now)

    def _estimate_slowed(self, now: float) -> tuple[float | None, float | None]:
        """The mean of two readings' masks counts for the time between."""
        reasons = self._reasons.read_one(now).current
        if reasons is None:
            return None, None
        mask, elapsed = int(reasons), now - self._mask_at
        self._held += elapsed * (bool(mask & HELD_BITS) + bool(self._mask & HELD_BITS)) / 2
        self._capped += elapsed * (bool(mask & CAPPED_BITS) + bool(self._mask & CAPPED_BITS)) / 2
        self._mask, self._mask_at = mask, now
        return self._held, self._capped

    def _holders(self, now: float) -> tuple[int | None, Mapping[int, int]]:
        """Bytes in use by everybody, and by each process that the driver names."""
        nvml = self._nvml
        try:
            _, used = memory(nvml, self._handle)
        except nvml.NVMLError:
            return None, {}
        named = GpuProcesses(nvml, self._handle, False).read(now)
        return used, {one.pid: int(one.memory_bytes.current) for one in named if one.memory_bytes.current is not None}
