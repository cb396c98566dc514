"""One NVML call as a metric: asked when due, its last value aged, its failures sorted and asked again later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.devices.nvidia.nvml_library import (
    DRIVER_GONE,
    FUNCTION_NOT_FOUND,
    GPU_GONE,
    Handle,
    Library,
    error_code,
    failed_reading,
)
from evener.devices.types import PENDING, UNSUPPORTED, Reading, State, value

RETRY_SECONDS = {State.UNSUPPORTED: 60.0, State.DENIED: 10.0}  # no answer is final: a driver may be updated
FAILED_RETRY_SECONDS = 5.0  # at most, for what failed in passing


class GpuGoneError(Exception):
    """The GPU fell off the bus or needs a reset; `code` is NVML's."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class DriverGoneError(Exception):
    """The driver was unloaded, or replaced: every handle is void."""


def raise_if_gone(code: int) -> None:
    """Raise GpuGoneError or DriverGoneError if the device or its driver has gone."""
    if code in GPU_GONE:
        raise GpuGoneError(code)
    if code in DRIVER_GONE:
        raise DriverGoneError


class Schedule:
    """When to ask again, and what to show meanwhile."""

    __slots__ = ("_at", "_due", "_last", "_period")

    def __init__(self, period_seconds: float = 0.0) -> None:
        self._period = period_seconds
        self._due = -math.inf
        self._at = 0.0
        self._last = PENDING

    def is_due(self, now: float) -> bool:
        """Whether to ask at `now`."""
        return now >= self._due

    def kept(self, now: float) -> Reading:
        """The last answer, with its age."""
        return self._last if now <= self._at else self._last.aged(now - self._at)

    def record(self, now: float, number: float) -> Reading:
        """The call answered."""
        if not math.isfinite(number):
            return self.record_passing_failure(now)
        self._last, self._at, self._due = value(number), now, now + self._period
        return self._last

    def record_failure(self, now: float, code: int) -> Reading:
        """The call failed with NVML's `code`; GpuGoneError or DriverGoneError if there is nothing left to ask."""
        raise_if_gone(code)
        reading = failed_reading(code)
        if reading.state not in RETRY_SECONDS:
            return self.record_passing_failure(now)
        self._last, self._due = reading, now + RETRY_SECONDS[reading.state]
        return reading

    def record_passing_failure(self, now: float) -> Reading:
        """The call failed for a passing reason: the last value stays, marked stale."""
        last = self.kept(now)
        self._due = now + min(self._period, FAILED_RETRY_SECONDS)
        return PENDING if last.value is None else last.aged(last.age_seconds, State.STALE)


class Metric:
    """One number of one device by one call."""

    __slots__ = ("_call", "_error", "_schedule")

    def __init__(self, nvml: Library, call: Callable[[], float], period_seconds: float = 0.0) -> None:
        self._call = call
        self._error = nvml.NVMLError
        self._schedule = Schedule(period_seconds)

    def read(self, now: float) -> Reading:
        """The number at `now`, or why there is none."""
        schedule = self._schedule
        if not schedule.is_due(now):
            return schedule.kept(now)
        try:
            return schedule.record(now, self._call())
        except self._error as error:
            return schedule.record_failure(now, error_code(error))
        except AttributeError:  # a binding older than the function
            return schedule.record_failure(now, FUNCTION_NOT_FOUND)


class Fields:
    """Many numbers of one device by one GetFieldValues call, each with its own outcome.

    Fields that the device doesn't have are left out of the next batches, and asked again once a minute.
    """

    def __init__(
        self, nvml: Library, handle: Handle, ids: Sequence[int | tuple[int, int]], period: float = 0.0
    ) -> None:
        self._nvml, self._handle, self._period = nvml, handle, period
        self._all = {each if isinstance(each, int) else each[0]: each for each in ids}
        self._schedules = {field: Schedule(period) for field in self._all}
        self._readings: dict[int, Reading] = dict.fromkeys(self._all, PENDING)
        self._getters = _union_members(nvml)

    def read(self, now: float) -> Mapping[int, Reading]:
        """Field id -> reading, in the field's own unit."""
        due = [field for field, schedule in self._schedules.items() if schedule.is_due(now)]
        for field in self._all.keys() - set(due):
            self._readings[field] = self._schedules[field].kept(now)
        if due:
            self._ask(due, now)
        return self._readings

    def _ask(self, due: Sequence[int], now: float) -> None:
        try:
            answers = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._all[field] for field in due])
        except self._nvml.NVMLError as error:
            for field in due:
                self._readings[field] = self._schedules[field].record_failure(now, error_code(error))
            return
        for field, answer in zip(due, answers, strict=True):
            schedule = self._schedules[field]
            if answer.nvmlReturn != 0:
                self._readings[field] = schedule.record_failure(now, answer.nvmlReturn)
            else:
                member = self._getters.get(answer.valueType, "ullVal")
                self._readings[field] = schedule.record(now, getattr(answer.value, member))


class Counter:
    """A number that only grows, turned into its rate; the first reading, a wrap and a reset give no rate.

    Drivers renew some counters ten times a second: `shortest_seconds` is the least time that a rate is taken over.
    """

    __slots__ = ("_at", "_number", "_rate", "_shortest")

    def __init__(self, shortest_seconds: float = 0.0) -> None:
        self._shortest = shortest_seconds
        self._number: float | None = None
        self._at = 0.0
        self._rate = PENDING

    def rate(self, reading: Reading, now: float) -> Reading:
        """Units per second since the last fresh reading."""
        number = reading.current
        if number is None and reading.state is not State.STALE:
            self._number, self._rate = None, PENDING
            return reading
        before, elapsed = self._number, now - self._at
        if number is None or reading.age_seconds > 0:
            return self._aged(reading.state, elapsed)
        if before is None or number < before:
            self._rate = PENDING
        elif elapsed < max(self._shortest, 1e-6):
            return self._aged(State.VALUE, elapsed)
        else:
            self._rate = value((number - before) / elapsed)
        self._number, self._at = number, now
        return self._rate

    def _aged(self, state: State, age_seconds: float) -> Reading:
        return self._rate.aged(max(0.0, age_seconds), state)


def first_value(*readings: Reading) -> Reading:
    """The first that has a value, else the first that is more than unsupported, else unsupported."""
    for reading in readings:
        if reading.value is not None:
            return reading
    return next((reading for reading in readings if reading.state is not State.UNSUPPORTED), UNSUPPORTED)


def _union_members(nvml: Any) -> dict[int, str]:
    return {
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    }
