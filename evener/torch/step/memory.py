"""Estimate how many rows fit in memory, from the peaks measured during training."""

from __future__ import annotations

import os
import resource

import torch

from ...system.cores import free_memory_bytes
from ...training.memory_growth import LEFT, LEFT_AT_RISK, MemoryPeaks


class MemoryGauge:
    """Estimates how many rows fit in a device's memory in one pass.

    `world` is the number of ranks. On CPUs, the ranks of one machine share its memory.
    """

    # `at_risk` is set if running out of memory would stop the run, or if rows have different
    # lengths

    def __init__(self, device: torch.device, world: int) -> None:
        self._device = device
        # processes that share the host
        self._processes = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self._peaks = MemoryPeaks()
        self._capacity_bytes = 0.0  # at the last measurement
        self.at_risk = True

    def measure(self, rows: int) -> int:
        """Measure memory after a step, and estimate how many rows fit in one pass.

        `rows` is the number of rows in the step's largest pass. The result is 0 if unknown.
        """
        if self._device.type == "cuda":
            self._capacity_bytes = self._measure_gpu(rows)
        else:
            self._capacity_bytes = self._measure_process(rows)
        return self._peaks.most_rows(self._capacity_bytes, self._left)

    def most_in_several(self, gradient_bytes: float) -> int:
        """Estimate the largest number of rows in a pass, if a batch is computed in several passes.

        Memory then also holds the gradients of earlier passes, which take `gradient_bytes`. The
        result is 0 unless passes of two sizes were measured. Call `measure` first.
        """
        return self._peaks.most_rows_with_reserve(self._capacity_bytes, self._left, gradient_bytes)

    @property
    def _left(self) -> float:
        return LEFT_AT_RISK if self.at_risk else LEFT

    def _measure_gpu(self, rows: int) -> float:
        """Record the GPU's peak memory for a pass of `rows` rows; return the usable bytes."""
        # Usable bytes are those that other processes leave, within set_per_process_memory_fraction.
        # What the allocator reserves beyond the tensors' peak is assumed to grow with the peak.
        stats = torch.cuda.memory_stats(self._device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        peak = stats.get("allocated_bytes.all.peak", 0)
        held = stats.get("allocated_bytes.all.current", 0)
        overhead = max(1.0, reserved / peak) if peak else 1.0
        self._peaks.record(rows, peak * overhead, held * overhead)
        free, total = torch.cuda.mem_get_info(self._device)
        fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        return float(min(free + reserved, fraction * total))

    def _measure_process(self, rows: int) -> float:
        """Record this process's peak memory for a pass of `rows` rows; return the usable bytes."""
        # usable bytes are the peak plus an equal part of the host's free memory
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._peaks.record(rows, peak_kib * 1024)
        return peak_kib * 1024 + free_memory_bytes() / self._processes

    def make_room(self) -> None:
        """Release the memory that the CUDA allocator has cached."""
        # cached blocks of the old size would be too small for the larger share
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
