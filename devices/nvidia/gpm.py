"""Activity between two ticks by NVIDIA's GPU performance monitoring (Hopper and later), without sleeping.

Each tick's sample is kept and paired with the next one's, so a figure covers the whole tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .nvml_calls import Batch, Outcome
from .nvml_library import UNKNOWN, Handle, Library

SM, OCCUPANCY, TENSOR, DRAM = 2, 3, 5, 10  # percent
PCIE_SEND, PCIE_RECEIVE, LINK_RECEIVE, LINK_SEND = 20, 21, 60, 61  # MiB/s
METRICS = (SM, OCCUPANCY, TENSOR, DRAM, PCIE_SEND, PCIE_RECEIVE, LINK_RECEIVE, LINK_SEND)
SHORTEST_SECONDS = 0.1  # between two samples, by nvml.h
LARGEST = 1e12  # more is no measurement


class Activity(Batch):
    """The pair of samples of one device. `instance`: the GPU instance id if the handle is of a MIG device's parent."""

    def __init__(self, nvml: Library, handle: Handle, instance: int | None = None) -> None:
        super().__init__(nvml, METRICS)
        self._handle, self._instance = handle, instance
        self._samples: list[Any] = []
        self._sampled_at: float | None = None  # the newer one; None: there is none yet, or the last call failed
        self._request: Any = None

    def close(self) -> None:
        """Free the samples."""
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
        self._samples, self._sampled_at = [oldest, newer], now
        if before is None:
            return {}
        self._request.sample1, self._request.sample2 = newer, oldest
        nvml.nvmlGpmMetricsGet(self._request)
        return {slot.metricId: _outcome(slot) for slot in self._request.metrics[: len(METRICS)]}

    def _set_up(self) -> None:
        """NVMLError where the device has no such monitoring."""
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
