"""Activity between two ticks by NVIDIA's GPU performance monitoring (Hopper and later), without sleeping.

Each tick's sample is kept and paired with the next one's, so a figure covers the whole tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from evener.devices.nvidia.nvml_calls import raise_if_gone
from evener.devices.nvidia.nvml_library import Handle, Library, error_code, failed_reading
from evener.devices.types import PENDING, UNSUPPORTED, Reading, State, value

SM, OCCUPANCY, TENSOR, DRAM = 2, 3, 5, 10  # percent
PCIE_SEND, PCIE_RECEIVE, LINK_RECEIVE, LINK_SEND = 20, 21, 60, 61  # MiB/s
METRICS = (SM, OCCUPANCY, TENSOR, DRAM, PCIE_SEND, PCIE_RECEIVE, LINK_RECEIVE, LINK_SEND)
SHORTEST_SECONDS = 0.1  # between two samples, by nvml.h
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 2.0, 60.0


class Activity:
    """The pair of samples of one device. `instance`: the GPU instance id if the handle is of a MIG device's parent."""

    def __init__(self, nvml: Library, handle: Handle, instance: int | None = None) -> None:
        self._nvml, self._handle, self._instance = nvml, handle, instance
        self._samples: list[Any] = []
        self._paired_at: float | None = None  # when the older sample was taken
        self._readings: dict[int, Reading] = dict.fromkeys(METRICS, PENDING)
        self._read_at = 0.0
        self._retry_at = 0.0
        self._backoff = FIRST_BACKOFF_SECONDS
        self._request: Any = None

    def read(self, now: float) -> Mapping[int, Reading]:
        """Metric id -> reading since the tick before."""
        if now < self._retry_at:
            return self._readings
        if self._paired_at is not None and now - self._paired_at < SHORTEST_SECONDS:
            return self._aged(now)
        try:
            if self._request is None and not self._set_up():
                return self._give_up(UNSUPPORTED, now)
            self._look(now)
        except self._nvml.NVMLError as error:
            code = error_code(error)
            raise_if_gone(code)
            return self._give_up(failed_reading(code), now)
        except AttributeError:  # a binding older than these functions
            return self._give_up(UNSUPPORTED, now)
        self._backoff = FIRST_BACKOFF_SECONDS
        return self._readings

    def close(self) -> None:
        """Free the samples."""
        while self._samples:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(self._samples.pop())

    def _set_up(self) -> bool:
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
            return False
        while len(self._samples) < 2:
            self._samples.append(nvml.nvmlGpmSampleAlloc())
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)
        for slot, metric in zip(request.metrics, METRICS, strict=False):
            slot.metricId = metric
        self._request = request
        return True

    def _look(self, now: float) -> None:
        nvml, (older, newer) = self._nvml, self._samples
        if self._instance is None:
            nvml.nvmlGpmSampleGet(self._handle, newer)
        else:
            nvml.nvmlGpmMigSampleGet(self._handle, self._instance, newer)
        paired = self._paired_at is not None
        self._samples, self._paired_at = [newer, older], now
        if paired:
            self._request.sample1, self._request.sample2 = older, newer
            nvml.nvmlGpmMetricsGet(self._request)
            self._readings = {slot.metricId: _reading(slot) for slot in self._request.metrics[: len(METRICS)]}
            self._read_at = now

    def _give_up(self, failed: Reading, now: float) -> Mapping[int, Reading]:
        """Say why, and try again after a pause that doubles up to a minute."""
        longest = LONGEST_BACKOFF_SECONDS
        self._retry_at = now + (longest if failed is UNSUPPORTED else self._backoff)
        self._backoff = min(longest, self._backoff * 2)
        self._paired_at = None
        old = {metric: reading.aged(now - self._read_at, State.STALE) for metric, reading in self._readings.items()}
        self._readings = old if failed is PENDING else dict.fromkeys(METRICS, failed)
        return self._readings

    def _aged(self, now: float) -> Mapping[int, Reading]:
        return {metric: reading.aged(now - self._read_at) for metric, reading in self._readings.items()}


def _reading(slot: Any) -> Reading:
    if slot.nvmlReturn == 0:
        number = float(slot.value)
        return value(number) if 0 <= number < 1e12 else PENDING
    return failed_reading(slot.nvmlReturn)
