"""Peak memory of a PyTorch process on its devices, and what the figure means."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch


class PeakMemory:
    """Made before the model: on a CPU the growth since then counts, as the allocator there tells nothing."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._gpu = any(device.type == "cuda" for device in devices)
        self._before = _status_bytes("VmRSS") or 0
        self.meaning = "peak in use, by PyTorch's allocator" if self._gpu else "growth of the peak resident memory"

    def reset(self) -> None:
        """Count from here on; what earlier sizes left unused is given back."""
        if self._gpu:
            torch.cuda.empty_cache()
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now

    def read(self) -> tuple[int | None, ...]:
        """Bytes for each device; None where several share one process' memory, or nobody can tell.

        On a GPU what tensors used: that grows with the batch; what the allocator keeps depends on what was before.
        """
        if self._gpu:
            return tuple(int(torch.cuda.max_memory_allocated(device)) for device in self._devices)
        peak = _status_bytes("VmHWM")
        if len(self._devices) != 1 or peak is None:
            return (None,) * len(self._devices)
        return (max(0, peak - self._before),)


def _status_bytes(key: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
