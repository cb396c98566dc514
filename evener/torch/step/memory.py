"""The memory of a rank's device, as its passes use it."""

from __future__ import annotations

import os
import resource

import torch

from ...system.cores import free_memory_bytes
from ...training.memory_growth import LEFT, LEFT_AT_RISK, MemoryPeaks


class MemoryGauge:
    """Notes what passes take of a rank's memory, and says how many rows of one it will hold.

    `at_risk`: a pass that runs out of memory would end the training, or lengths of rows vary.
    """

    def __init__(self, device: torch.device, world: int) -> None:
        self._device = device
        self._processes = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # that share the host
        self._peaks = MemoryPeaks()
        self.at_risk = True

    def measure(self, rows: int) -> int:
        """The rows of a pass that memory is predicted to hold, after passes of up to these rows; 0
        where nothing tells.
        """
        if self._device.type == "cuda":
            capacity_bytes = self._measure_gpu(rows)
        else:
            capacity_bytes = self._measure_process(rows)
        left = LEFT_AT_RISK if self.at_risk else LEFT
        return self._peaks.most_rows(capacity_bytes, left)

    def _measure_gpu(self, rows: int) -> float:
        """Note the allocator's peak; returns the bytes that it could have.

        Neighbours on the device count, as does the limit of set_per_process_memory_fraction. What
        the allocator reserves beside the tensors' peak is taken to grow with it.
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
        """Note the process's peak; returns the bytes that it could have beside the other ranks of
        its host.
        """
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._peaks.note(rows, peak_kib * 1024)
        return peak_kib * 1024 + free_memory_bytes() / self._processes

    def make_room(self) -> None:
        """Return what the allocator has cached to the device before a share grows: pieces for the
        old size are too small for the new one.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
