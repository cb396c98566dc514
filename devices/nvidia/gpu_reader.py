"""Reads the metrics of one GPU through NVML. Expensive calls are made less often.

On an H200, temperature and clock take 0.4 ms each, and limits 2 to 3 ms. GetPcieThroughput would
block for 21 ms, so it isn't called. Most other metrics are field values, which are read together in
one call, or come from pairs of GPM samples (GPU performance monitoring).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from ..backend import Vitals
from ..snapshot_builder import DeviceUse
from ..types import UNSUPPORTED, Device, DeviceSample, Reading, State, value
from .nvml_calls import (
    DRAM,
    LINK_RECEIVE,
    LINK_SEND,
    OCCUPANCY,
    PCIE_RECEIVE,
    PCIE_SEND,
    SM,
    TENSOR,
    Activity,
    Counter,
    Fields,
    Metric,
    first_value,
    raise_if_gone,
)
from .nvml_library import NOT_FOUND, SUCCESS, Handle, Library, error_code, failed_reading, memory

SLOW_SECONDS = 5.0  # period for limits, which rarely change, and the fan
ENERGY_SECONDS = 9.9  # period for the energy counter, 4.4 ms; it only grows
ONCE_SECONDS = 3600.0
CALM_SECONDS = 1.9  # period for the temperature, 0.4 ms: every other second
THROTTLE_SECONDS = 3.9  # period for the throttling counters, 1 to 3 ms; they are cumulative
# shortest time for a rate, because some drivers update counters only ten times a second
SHORTEST_WINDOW_SECONDS = 0.4
ALL_LINKS = 0xFFFFFFFF  # the scope that sums NVLink's counters
MIB = 1 << 20
KIB = 1 << 10

# Field ids of nvml.h; the throttling fields count nanoseconds
ECC_UNCORRECTED = 4
POWER_CAP = 74
SYNC_BOOST = 76
ENERGY = 83
LINK_SEND_KIB = 138
LINK_RECEIVE_KIB = 139
POWER_AVERAGE = 185
POWER_LIMIT = 190
PCIE_SEND_BYTES = 197
PCIE_RECEIVE_BYTES = 198
RECOVERY_ACTION = 230
SOFTWARE_HEAT = 269
HARDWARE_HEAT = 270
POWER_BRAKE = 271

THROTTLING = {
    POWER_CAP: "power cap",
    SOFTWARE_HEAT: "heat (software)",
    HARDWARE_HEAT: "heat (hardware)",
    POWER_BRAKE: "power brake",
    SYNC_BOOST: "sync boost",
}
EVENT_REASONS = {  # bits of CurrentClocksEventReasons, for chips without the counters
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
RECOVERY = {  # nvmlDeviceGpuRecoveryAction_t
    1: "The driver asks for a reset of this GPU.",
    2: "The driver asks for a reboot because of this GPU.",
    3: "The driver asks to end peer-to-peer work on this GPU.",
    4: "The driver asks to end all work on this GPU and to reset it.",
}
HELD_FIELDS = (SOFTWARE_HEAT, HARDWARE_HEAT, POWER_BRAKE)
# bits of the reasons' mask, for chips without the counters
HELD_BITS = 0x08 | 0x20 | 0x40 | 0x80
CAPPED_BITS = 0x04
# Fraction of the driver's highest clock above which the highest clock that the device reached is
# used instead: GeForce cards stay 5 to 20 % below the driver's value, and at a third of it a device
# is idle.
REACHED = 0.75
LEAST_NAMED_PERCENT = 0.5  # a reason for a smaller part of a tick isn't named


class GpuReader:
    """Reads the metrics of a GPU or MIG instance through NVML.

    `parent` is the GPU that a MIG instance belongs to. Metrics that change slowly or are expensive
    are read less often. After a `GpuGoneError` or `DriverGoneError`, a new reader has to be
    created.
    """

    def __init__(
        self, nvml: Library, handle: Handle, device: Device, parent: Handle | None = None
    ) -> None:
        self.nvml = nvml
        self.handle = handle
        self.device = device
        self.processes = GpuProcesses(nvml, handle, parent is not None)
        instance = None if parent is None else nvml.nvmlDeviceGetGpuInstanceId(handle)
        self._activity = Activity(nvml, handle if parent is None else parent, instance)
        links = dict.fromkeys((LINK_SEND_KIB, LINK_RECEIVE_KIB), ALL_LINKS)
        self._fields = Fields(nvml, handle, [POWER_AVERAGE])
        self._throttle_fields = Fields(nvml, handle, THROTTLING, THROTTLE_SECONDS)
        self._traffic_fields = Fields(nvml, handle, _TRAFFIC, scopes=links)
        self._slow_fields = Fields(
            nvml, handle, [POWER_LIMIT, RECOVERY_ACTION, ECC_UNCORRECTED], SLOW_SECONDS
        )
        self._energy_fields = Fields(nvml, handle, [ENERGY], ENERGY_SECONDS)
        self._counters = {
            field: Counter(SHORTEST_WINDOW_SECONDS) for field in (*THROTTLING, *_TRAFFIC)
        }
        self.first_joules: float | None = None  # the energy counter when the sampler started
        self._probe_fields = Fields(nvml, handle, [*HELD_FIELDS, POWER_CAP, ENERGY])
        self._throttled_before = False  # whether the monitor's last reading had reasons
        self._mask = 0
        self._mask_at = time.monotonic()
        self._held = self._capped = 0.0
        self._joules = 0.0
        self._watts = 0.0
        self._watts_at = 0.0
        self._full = Vitals()  # the last full reading
        self._used_since = (
            0  # time on the driver's clock up to which the processes' use has been read
        )
        # seconds throttled and at the power cap, as last read
        self._slowed_before: tuple[float | None, float | None] = (None, None)
        self._reached_mhz = 0.0  # the highest clock read so far
        self._metrics = {name: Metric(nvml, call, period) for name, call, period in self._calls()}

    def sample(self, now: float) -> DeviceSample:
        """Return all metrics of the GPU. `now` is in seconds of the monotonic clock.

        Raises `GpuGoneError` or `DriverGoneError` if the GPU or the driver is gone.
        """
        read = {
            name: metric.read_one(now)
            for name, metric in self._metrics.items()
            if name not in _FALLBACKS
        }
        activity = self._activity.read(now)
        slow = self._slow_fields.read(now)
        energy = self._energy_fields.read(now)[ENERGY]
        throttled, reasons = self._read_throttling(now)
        return DeviceSample(
            device=self.device,
            utilization_percent=read["utilization"],
            sm_percent=activity[SM],
            occupancy_percent=activity[OCCUPANCY],
            tensor_percent=activity[TENSOR],
            dram_percent=activity[DRAM],
            memory_used_bytes=read["memory_used"],
            memory_total_bytes=UNSUPPORTED
            if self.device.memory_bytes is None
            else value(self.device.memory_bytes),
            temperature_celsius=read["temperature"],
            temperature_limit_celsius=read["temperature_limit"],
            power_watts=self._current(
                self._fields.read(now)[POWER_AVERAGE].scaled(1e-3), "power", now
            ),
            power_limit_watts=self._current(slow[POWER_LIMIT].scaled(1e-3), "power_limit", now),
            energy_joules=self._energy(energy),
            clock_mhz=read["clock"],
            clock_max_mhz=read["clock_max"],
            throttled_percent=throttled,
            throttle_reasons=reasons,
            fan_percent=read["fan"],
            ecc_errors=slow[ECC_UNCORRECTED],
            note=RECOVERY.get(int(slow[RECOVERY_ACTION].current or 0), ""),
            **self._read_traffic(activity, now),
        )

    def vitals(self, full: bool) -> Vitals:
        """Return throttling times, clock and energy, which show whether a measurement is valid.

        If `full` is True, memory, processes and utilization are read, too. Otherwise, their values
        from the last full call are returned. `clock_fraction` is None unless the throttling times
        have changed since the last call. Raises `GpuGoneError` or `DriverGoneError` if the GPU or
        the driver is gone.
        """
        now = time.monotonic()
        counters = dict(self._probe_fields.read(now))
        energy = counters.pop(ENERGY)
        brake = counters[POWER_BRAKE].current
        held, capped = self._slowed(now, counters)
        is_slowed = (held, capped) != self._slowed_before
        self._slowed_before = held, capped
        self._note_clock(self._metrics["clock, seldom"].read_one(now))
        if full:
            self._full = self._read_full(now)
        return msgspec.structs.replace(
            self._full,
            at_seconds=now,
            held_seconds=held,
            braked_seconds=None if brake is None else brake / 1e9,
            capped_seconds=capped,
            clock_fraction=self._clock_fraction(now) if is_slowed else None,
            joules=self._used_joules(now, energy),
        )

    def _clock_fraction(self, now: float) -> float | None:
        """Return the current clock as a fraction of the highest, or None if it is unknown."""
        clock = self._note_clock(self._metrics["clock"].read_one(now))
        highest = self._metrics["clock_max"].read_one(now).current
        if clock is None or not highest:
            return None
        # many devices never reach the driver's maximum; it is used as long as only low clocks were
        # seen
        if self._reached_mhz >= REACHED * highest:
            highest = self._reached_mhz
        return min(1.0, clock / highest)

    def _note_clock(self, reading: Reading) -> float | None:
        """Return the current clock in MHz, or None if unknown, and remember the highest so far."""
        clock = reading.current
        if clock is not None:
            self._reached_mhz = max(self._reached_mhz, clock)
        return clock

    def _used_joules(self, now: float, counter: Reading) -> float | None:
        """Return the energy that the GPU has used so far in joules, or None if it is unknown.

        `counter` is the reading of the GPU's energy counter. For a GPU without a counter, the
        energy is computed from power readings.
        """
        if counter.state is not State.UNSUPPORTED:
            return None if counter.current is None else counter.current / 1000
        # a chip without a counter: integrate the power over the calls of this method
        watts = self._metrics["power"].read_one(now).current
        if watts is None:
            return None
        if self._watts_at:
            self._joules += (self._watts + watts) / 2 * (now - self._watts_at)
        self._watts = watts
        self._watts_at = now
        return self._joules

    def _slowed(
        self, now: float, counters: Mapping[int, Reading]
    ) -> tuple[float | None, float | None]:
        """Return how long the GPU was throttled by heat or a power brake, and by its power cap.

        Both are totals in seconds that count from an arbitrary start, so only differences are
        meaningful. Both are None if they are unknown.
        """
        # the driver counts nanoseconds since a fixed time
        counts = {
            field: reading.current / 1e9
            for field, reading in counters.items()
            if reading.current is not None
        }
        if counts:
            held = [counts[field] for field in HELD_FIELDS if field in counts]
            return (max(held) if held else None), counts.get(POWER_CAP)
        if any(reading.state is not State.UNSUPPORTED for reading in counters.values()):
            return None, None  # the device has the counters, but doesn't answer at the moment
        return self._estimate_slowed(now)

    def _estimate_slowed(self, now: float) -> tuple[float | None, float | None]:
        """Estimate how long a GPU without counters was throttled, from its throttle reasons.

        Returns two times, in seconds since the reader was created: throttling by heat or a power
        brake, and throttling by the power cap. Both are None if they are unknown.
        """
        reasons = self._metrics["reasons"].read_one(now).current
        if reasons is None:
            return None, None
        mask = int(reasons)
        elapsed = now - self._mask_at
        # a reason in one of two successive readings counts for half of the time between them
        self._held += elapsed * (bool(mask & HELD_BITS) + bool(self._mask & HELD_BITS)) / 2
        self._capped += elapsed * (bool(mask & CAPPED_BITS) + bool(self._mask & CAPPED_BITS)) / 2
        self._mask = mask
        self._mask_at = now
        return self._held, self._capped

    def _read_full(self, now: float) -> Vitals:
        """Return memory use, processes and utilization. Other fields have their default values."""
        used, percent = (
            self._metrics[name].read_one(now).current for name in ("memory_used", "utilization")
        )
        table = GpuProcesses(self.nvml, self.handle, False, self._used_since)
        seen = table.read(now)
        self._used_since = table.since
        sizes = {each.pid: each.memory_bytes.current for each in seen}
        processes = {pid: None if size is None else int(size) for pid, size in sizes.items()}
        busy = {each.pid: (each.sm_percent.current or 0.0) / 100 for each in seen}
        return Vitals(
            used_bytes=None if used is None else int(used),
            processes=processes,
            busy=busy,
            busy_percent=percent,
        )

    def close(self) -> None:
        """Free the buffers of NVML's samples. The reader can't be used any more."""
        with suppress(self.nvml.NVMLError):
            self._activity.close()

    def _calls(self) -> list[tuple[str, Callable[[], float], float]]:
        nvml = self.nvml
        handle = self.handle
        slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return [
            ("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 0.0),
            ("memory_used", self._used_bytes, 0.0),
            (
                "temperature",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                CALM_SECONDS,
            ),
            ("clock", self._read_clock, 0.0),
            ("clock, seldom", self._read_clock, SLOW_SECONDS),
            ("fan", lambda: nvml.nvmlDeviceGetFanSpeed(handle), SLOW_SECONDS),
            (
                "temperature_limit",
                lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, slowdown),
                ONCE_SECONDS,
            ),
            (
                "clock_max",
                lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                ONCE_SECONDS,
            ),
            ("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 0.0),
            (
                "power_limit",
                lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
                SLOW_SECONDS,
            ),
            ("reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle), 0.0),
        ]

    def _read_clock(self) -> float:
        return float(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

    def _used_bytes(self) -> float:
        _, used = memory(self.nvml, self.handle)
        if used is None:
            raise self.nvml.NVMLError(self.nvml.NVML_ERROR_NOT_SUPPORTED)
        return used

    def _current(self, field: Reading, fallback: str, now: float) -> Reading:
        """Return the reading of a field or, if the field has no value, of an equivalent NVML call.

        `fallback` is the name of the metric that is read by this call.
        """
        return (
            field
            if field.current is not None
            # a plain NVML call, which costs more
            else first_value(self._metrics[fallback].read_one(now), field)
        )

    def _energy(self, millijoules: Reading) -> Reading:
        joules = millijoules.scaled(1e-3)
        if joules.current is not None and (
            self.first_joules is None or joules.current < self.first_joules
        ):
            self.first_joules = joules.current
        if joules.value is None or self.first_joules is None:
            return joules
        return Reading(joules.state, joules.value - self.first_joules, joules.age_seconds)

    def _read_throttling(self, now: float) -> tuple[Reading, tuple[str, ...]]:
        """Return the percentage of time for which the GPU was throttled, and the reasons.

        The reason that lasted longest comes first.
        """
        fields = self._throttle_fields.read(now)
        rates = {field: self._counters[field].rate(fields[field], now) for field in THROTTLING}
        shares = {
            field: min(100.0, rate.current / 1e7)
            for field, rate in rates.items()
            if rate.current is not None
        }
        if shares:
            named = [field for field, share in shares.items() if share >= LEAST_NAMED_PERCENT]
            named.sort(key=lambda field: -shares[field])
            age = max(rate.age_seconds for rate in rates.values())
            # the percentage is the longest-lasting reason's
            return value(max(shares.values()), age), tuple(THROTTLING[field] for field in named)
        rate = first_value(*rates.values())
        if rate.value is not None or rate.state is State.DENIED:
            return rate, ()
        # a chip without counters, or the first reading
        return self._estimate_throttling(rate, self._reasons_now(now))

    def _estimate_throttling(
        self, rate: Reading, reasons: tuple[str, ...] | None
    ) -> tuple[Reading, tuple[str, ...]]:
        """Return the percentage of time for which the GPU was throttled, and the reasons.

        `rate` is the percentage from the GPU's counters. For a GPU without counters, it is
        estimated from two readings of the throttle reasons.
        """
        # a chip with counters isn't estimated, even if they have no value yet
        if rate.state is not State.UNSUPPORTED or reasons is None:
            return rate, reasons or ()
        before, self._throttled_before = self._throttled_before, bool(reasons)
        # a reason in one of two successive readings counts for half of the time between them
        return value(50.0 * (before + bool(reasons))), reasons

    def _reasons_now(self, now: float) -> tuple[str, ...] | None:
        """Return the current reasons for throttling, or None if they can't be read."""
        current = self._metrics["reasons"].read_one(now).current
        if current is None:
            return None
        mask = int(current)
        return tuple(words for bit, words in EVENT_REASONS.items() if mask & bit)

    def _read_traffic(self, activity: Mapping[int, Reading], now: float) -> dict[str, Any]:
        """Return the PCIe and NVLink traffic in bytes per second.

        `activity` contains GPM readings. Values that they lack come from the driver's counters. The
        keys of the result are fields of `DeviceSample`.
        """
        found = {name: activity[metric].scaled(MIB) for name, metric, _ in _TRAFFIC.values()}
        if all(reading.current is not None for reading in found.values()):
            return found
        # values that GPM lacks come from the driver's counters
        fields = self._traffic_fields.read(now)
        for field, (name, _, unit) in _TRAFFIC.items():
            counted = self._counters[field].rate(fields[field], now).scaled(unit)
            if found[name].current is None:
                found[name] = (
                    counted if counted.current is not None else first_value(found[name], counted)
                )
        return found


# read only if the fields have no value, or for a probe
_FALLBACKS = frozenset({"power", "power_limit", "reasons", "clock, seldom"})
_TRAFFIC = {
    PCIE_RECEIVE_BYTES: ("pcie_receive_bytes_per_second", PCIE_RECEIVE, 1),
    PCIE_SEND_BYTES: ("pcie_send_bytes_per_second", PCIE_SEND, 1),
    LINK_RECEIVE_KIB: ("link_receive_bytes_per_second", LINK_RECEIVE, KIB),
    LINK_SEND_KIB: ("link_send_bytes_per_second", LINK_SEND, KIB),
}


PERIOD_SECONDS = 2.5
GRAPHICS_EVERY = 4  # in periods, because on a desktop this call takes 4.5 ms
USE_EVERY = 2  # in periods, while the processes stay the same; the call takes 2 ms on an H200
FIRST_WINDOW_MICROSECONDS = 3_000_000  # how much of the driver's buffer is read at first


class GpuProcesses:
    """Lists the processes on a GPU, with their use of memory and multiprocessors.

    Multiprocessor use is counted from the time `since`, in microseconds of the driver's clock. NVML
    can't report it for MIG instances.
    """

    def __init__(self, nvml: Library, handle: Handle, is_mig: bool, since: int = 0) -> None:
        self._nvml = nvml
        self._handle = handle
        self._is_mig = is_mig
        self._due = 0.0
        self._looks = 0
        self._memory: dict[str, dict[int, int | None]] = {"compute": {}, "graphics": {}}
        # use by pid, and the reading of all other processes together
        self._use: tuple[Mapping[int, float], Reading] = ({}, UNSUPPORTED)
        self.since = since  # the driver's time of the newest utilization sample, in microseconds
        self._seen: tuple[DeviceUse, ...] = ()

    def read(self, now: float) -> Sequence[DeviceUse]:
        """Return the processes on the GPU, sorted by pid.

        The list is updated every 2.5 seconds. Raises `GpuGoneError` or `DriverGoneError` if the GPU
        or the driver is gone.
        """
        if now < self._due:
            return self._seen
        self._due = now + PERIOD_SECONDS
        self._list("compute", self._nvml.nvmlDeviceGetComputeRunningProcesses_v3)
        if self._looks % GRAPHICS_EVERY == 0 and not self._is_mig:
            self._list("graphics", self._nvml.nvmlDeviceGetGraphicsRunningProcesses_v3)
        memory = {**self._memory["graphics"], **self._memory["compute"]}
        if self._looks % USE_EVERY == 0 or memory.keys() != {each.pid for each in self._seen}:
            self._use = self._ask_use() if memory else ({}, UNSUPPORTED)
        self._looks += 1
        use, otherwise = self._use
        self._seen = tuple(
            DeviceUse(
                pid,
                UNSUPPORTED if used is None else value(used),
                value(use[pid]) if pid in use else otherwise,
            )
            for pid, used in sorted(memory.items())
        )
        return self._seen

    def _list(self, kind: str, call: Callable[[Handle], Sequence[Any]]) -> None:
        """Update the memory use of all compute or graphics processes on the GPU.

        `kind` is "compute" or "graphics", and `call` returns these processes. If it fails, the old
        values are kept.
        """
        try:
            self._memory[kind] = {int(each.pid): each.usedGpuMemory for each in call(self._handle)}
        except self._nvml.NVMLError as error:
            raise_if_gone(error_code(error))

    def _ask_use(self) -> tuple[dict[int, float], Reading]:
        """Return how much each process uses the multiprocessors, in percent, by pid.

        The second value is the reading for all processes that aren't in the dict: 0, or the reason
        why NVML can't report their use.
        """
        try:
            samples: Sequence[Any] = self._nvml.nvmlDeviceGetProcessUtilization(
                self._handle, self.since
            )
        except self._nvml.NVMLError as error:
            code = error_code(error)
            raise_if_gone(code)
            # the binding raises for an empty list too
            if code in (SUCCESS, NOT_FOUND) and not self._is_mig:
                return {}, value(0.0)
            return {}, failed_reading(code)
        newest = max((int(sample.timeStamp) for sample in samples), default=self.since)
        start = self.since or newest - FIRST_WINDOW_MICROSECONDS
        self.since = newest
        parts: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > start and sample.smUtil <= 100:
                parts.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        return {pid: sum(numbers) / len(numbers) for pid, numbers in parts.items()}, value(0.0)
