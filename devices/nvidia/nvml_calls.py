"""Metrics that NVML calls return, each read at its own interval.

Until a metric is due, its last value is returned with its age. Some failures are retried. NVIDIA's
GPU performance monitoring (GPM, since Hopper) computes metrics from two samples. Each new sample is
compared with the one before, so that no call has to wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..types import PENDING, UNSUPPORTED, Reading, State, value
from .nvml_library import (
    DRIVER_GONE,
    FUNCTION_NOT_FOUND,
    GONE_WORDS,
    GPU_GONE,
    SUCCESS,
    UNKNOWN,
    Handle,
    Library,
    error_code,
    failed_reading,
)

# failures that are retried, because a driver may be updated
RETRY_SECONDS = {State.UNSUPPORTED: 60.0, State.DENIED: 10.0}
VALUE_MEMBERS = (
    "dVal",
    "uiVal",
    "ulVal",
    "ullVal",
    "sllVal",
    "siVal",
    "usVal",
)  # member of nvmlValue_t by a field's type, as nvml.h numbers them
FAILED_RETRY_SECONDS = 5.0  # longest wait after a temporary failure
Outcome = tuple[int, float]  # NVML's return code, and the value if the code is SUCCESS


class GpuGoneError(Exception):
    """The GPU is lost, needs a reset, or is no longer listed by the driver."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(GONE_WORDS.get(code, "The driver no longer lists this GPU."))


class DriverGoneError(Exception):
    """The driver was unloaded or replaced."""

    def __init__(self) -> None:
        super().__init__("The NVIDIA driver was unloaded or replaced.")


def raise_if_gone(code: int) -> None:
    """Raise an error if NVML's return code means that the GPU or the driver is gone.

    The error is a `GpuGoneError` or a `DriverGoneError`.
    """
    if code in GPU_GONE:
        raise GpuGoneError(code)
    if code in DRIVER_GONE:
        raise DriverGoneError


class Schedule:
    """Decides when to read a metric again, and keeps its last value.

    A metric that isn't supported is tried again after 60 seconds. A metric that this user isn't
    allowed to read is tried again after 10 seconds.
    """

    __slots__ = ("_at", "_due", "_last", "_period")

    def __init__(self, period_seconds: float = 0.0) -> None:
        self._period = period_seconds
        self._due = -math.inf
        self._at = 0.0
        self._last = PENDING

    def is_due(self, now: float) -> bool:
        """Return True if the metric should be read now."""
        return now >= self._due

    def kept(self, now: float) -> Reading:
        """Return the last reading, with its current age."""
        return self._last if now <= self._at else self._last.aged(now - self._at)

    def record(self, now: float, code: int, number: float) -> Reading:
        """Store the result of a call, and return it as a reading.

        `code` is NVML's return code, and `number` is the value. After a temporary failure, the last
        value is returned and marked as stale. Raises `GpuGoneError` or `DriverGoneError` if the GPU
        or the driver is gone.
        """
        if code == SUCCESS and math.isfinite(number):
            self._last = value(number)
            self._at = now
            self._due = now + self._period
            return self._last
        raise_if_gone(code)
        reading = failed_reading(code)
        if reading.state in RETRY_SECONDS:
            self._last = reading
            self._due = now + RETRY_SECONDS[reading.state]
            return reading
        last = self.kept(now)
        self._due = now + min(self._period, FAILED_RETRY_SECONDS)
        return PENDING if last.value is None else last.aged(last.age_seconds, State.STALE)


class Batch:
    """Metrics that can be read together in one NVML call, each with its own schedule."""

    def __init__(self, nvml: Library, ids: Iterable[int], period: float = 0.0) -> None:
        self._nvml = nvml
        self._schedules = {each: Schedule(period) for each in ids}

    def read(self, now: float) -> Mapping[int, Reading]:
        """Read the metrics that are due, and return the readings of all metrics, by id.

        Raises `GpuGoneError` or `DriverGoneError` if the GPU or the driver is gone.
        """
        schedules = self._schedules
        due = [each for each, schedule in schedules.items() if schedule.is_due(now)]
        readings = {each: schedule.kept(now) for each, schedule in schedules.items()}
        for each, outcome in (self._try(due, now) if due else {}).items():
            readings[each] = schedules[each].record(now, *outcome)
        return readings

    def _try(self, due: Sequence[int], now: float) -> Mapping[int, Outcome]:
        try:
            return self._ask(due, now)
        except self._nvml.NVMLError as error:
            code = error_code(error)
        except AttributeError:  # a pynvml older than the function
            code = FUNCTION_NOT_FOUND
        return dict.fromkeys(due, (code, 0.0))

    def _ask(self, due: Sequence[int], now: float) -> Mapping[int, Outcome]:
        """Read the metrics in `due`, and return NVML's return code and the value of each.

        Subclasses implement it. A metric that is missing from the result keeps its last value.
        """
        raise NotImplementedError


class Metric(Batch):
    """A metric that one NVML call returns."""

    def __init__(self, nvml: Library, call: Callable[[], float], period: float = 0.0) -> None:
        super().__init__(nvml, (0,), period)
        self._call = call

    def read_one(self, now: float) -> Reading:
        """Return the metric's reading. NVML is called only if the metric is due."""
        return self.read(now)[0]

    def _ask(self, due: Sequence[int], now: float) -> Mapping[int, Outcome]:
        return {0: (SUCCESS, self._call())}


class Fields(Batch):
    """Values of a GPU that NVML identifies by field ids. One call reads several of them.

    `scopes` maps field ids to their scopes, such as the number of a link.
    """

    def __init__(
        self,
        nvml: Library,
        handle: Handle,
        ids: Iterable[int],
        period: float = 0.0,
        scopes: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(nvml, ids, period)
        self._handle = handle
        self._scopes = scopes or {}

    def _ask(self, due: Sequence[int], now: float) -> Mapping[int, Outcome]:
        asked = [(field, self._scopes[field]) if field in self._scopes else field for field in due]
        answers = self._nvml.nvmlDeviceGetFieldValues(self._handle, asked)
        return {
            field: (answer.nvmlReturn, getattr(answer.value, VALUE_MEMBERS[answer.valueType]))
            for field, answer in zip(due, answers, strict=True)
        }


class Counter:
    """Computes how fast a counter increases, from its successive readings.

    A rate covers at least `shortest_seconds`, because drivers update some counters rarely.
    """

    __slots__ = ("_at", "_number", "_rate", "_shortest")

    def __init__(self, shortest_seconds: float = 0.0) -> None:
        # for example, only ten times a second
        self._shortest = shortest_seconds
        self._number: float | None = None
        self._at = 0.0
        self._rate = PENDING

    def rate(self, reading: Reading, now: float) -> Reading:
        """Return the increase per second since the last reading of the counter.

        The result is pending after the first reading and after a reset of the counter. If the
        counter can't be read, the result says why.
        """
        number = reading.current
        if number is None and reading.state is not State.STALE:
            self._number = None
            self._rate = PENDING
            return reading
        before = self._number
        elapsed = now - self._at
        if number is None or reading.age_seconds > 0:
            return self._aged(reading.state, elapsed)
        if before is None or number < before:
            self._rate = PENDING
        elif elapsed < max(self._shortest, 1e-6):
            return self._aged(State.VALUE, elapsed)
        else:
            self._rate = value((number - before) / elapsed)
        self._number = number
        self._at = now
        return self._rate

    def _aged(self, state: State, age_seconds: float) -> Reading:
        return self._rate.aged(max(0.0, age_seconds), state)


def first_value(*readings: Reading) -> Reading:
    """Return the first reading that has a value, for a metric that can be read in several ways.

    If none has a value, the first one that is supported is returned, or else `UNSUPPORTED`.
    """
    for reading in readings:
        if reading.value is not None:
            return reading
    return next(
        (reading for reading in readings if reading.state is not State.UNSUPPORTED), UNSUPPORTED
    )


# GPM metrics in percent, by id
SM = 2
OCCUPANCY = 3
TENSOR = 5
DRAM = 10
# GPM metrics in MiB/s, by id
PCIE_SEND = 20
PCIE_RECEIVE = 21
LINK_RECEIVE = 60
LINK_SEND = 61
METRICS = (SM, OCCUPANCY, TENSOR, DRAM, PCIE_SEND, PCIE_RECEIVE, LINK_RECEIVE, LINK_SEND)
SHORTEST_SECONDS = 0.1  # between two samples, according to nvml.h
LARGEST = 1e12  # larger values are invalid


class Activity(Batch):
    """The metrics of GPU performance monitoring (GPM), such as multiprocessor use and traffic.

    Each reading is a mean over the time between two samples. For a MIG instance, `instance` is its
    id, and `handle` belongs to its GPU.
    """

    def __init__(self, nvml: Library, handle: Handle, instance: int | None = None) -> None:
        super().__init__(nvml, METRICS)
        self._handle = handle
        self._instance = instance
        self._samples: list[Any] = []
        # time of the newer sample; None: none yet, or the last call failed
        self._sampled_at: float | None = None
        self._request: Any = None

    def close(self) -> None:
        """Free the buffers of NVML's samples."""
        while self._samples:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(self._samples.pop())

    def _ask(self, due: Sequence[int], now: float) -> Mapping[int, Outcome]:
        before = self._sampled_at
        if before is not None and now - before < SHORTEST_SECONDS:
            return {}
        self._sampled_at = None
        if self._request is None:
            self._set_up()
        nvml, (newer, oldest) = self._nvml, self._samples
        if self._instance is None:
            nvml.nvmlGpmSampleGet(self._handle, oldest)
        else:
            nvml.nvmlGpmMigSampleGet(self._handle, self._instance, oldest)
        self._samples = [oldest, newer]
        self._sampled_at = now
        if before is None:
            return {}
        self._request.sample1 = newer
        self._request.sample2 = oldest
        nvml.nvmlGpmMetricsGet(self._request)
        return {slot.metricId: _outcome(slot) for slot in self._request.metrics[: len(METRICS)]}

    def _set_up(self) -> None:
        """Allocate the buffers of the samples and the request.

        Raises `NVMLError` if the GPU has no GPM.
        """
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        while len(self._samples) < 2:
            self._samples.append(nvml.nvmlGpmSampleAlloc())
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)
        for slot, metric in zip(request.metrics, METRICS, strict=False):
            slot.metricId = metric
        self._request = request


def _outcome(slot: Any) -> Outcome:
    number = float(slot.value)
    return slot.nvmlReturn or (0 if 0 <= number < LARGEST else UNKNOWN), number
