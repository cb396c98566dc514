"""The use of a device's memory by a rank's passes."""

from __future__ import annotations

import os
import resource

import torch

from ...system.cores import free_memory_bytes
from ...training.memory_growth import LEFT, LEFT_AT_RISK, MemoryPeaks


class MemoryGauge:
    """Measures the memory that passes take, and predicts how many rows of a pass will fit.

    `at_risk` is True if a pass that runs out of memory would stop the training, or if the lengths
    of rows vary. Then more memory is left free.
    """

    def __init__(self, device: torch.device, world: int) -> None:
        self._device = device
        self._processes = int(
            os.environ.get("LOCAL_WORLD_SIZE", world)
        )  # processes that share the host
        self._peaks = MemoryPeaks()
        self.at_risk = True

    def measure(self, rows: int) -> int:
        """Return the rows of a pass that memory is predicted to hold; 0 if it can't be predicted.

        `rows` are the most rows of a pass so far.
        """
        if self._device.type == "cuda":
            capacity_bytes = self._measure_gpu(rows)
        else:
            capacity_bytes = self._measure_process(rows)
        left = LEFT_AT_RISK if self.at_risk else LEFT
        return self._peaks.most_rows(capacity_bytes, left)

    def _measure_gpu(self, rows: int) -> float:
        """Note the allocator's peak, and return the bytes that it could use.

        Memory of other processes on the device is subtracted, and the limit of
        set_per_process_memory_fraction applies. Memory that the allocator reserves beyond the
        tensors' peak is assumed to grow in proportion to the peak.
        """
        stats = torch.cuda.memory_stats(self._device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        peak = stats.get("allocated_bytes.all.peak", 0)
        held = stats.get("allocated_bytes.all.current", 0)
        overhead = max(1.0, reserved / peak) if peak else 1.0
        self._peaks.note(rows, peak * overhead, held * overhead)
        free, total = torch.cuda.mem_get_info(self._device)
        fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        return float(min(free + reserved, fraction * total))

    def _measure_process(self, rows: int) -> float:
        """Note the process's peak, and return the bytes that it could use.

        They are the peak and this process's equal part of the host's free memory.
        """
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._peaks.note(rows, peak_kib * 1024)
        return peak_kib * 1024 + free_memory_bytes() / self._processes

    def make_room(self) -> None:
        """Return the allocator's cached memory to the device before a share grows.

        Cached blocks of the old size are too small for the new one.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
