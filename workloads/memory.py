"""The most memory that a training process took on its devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class GpuMemory(NamedTuple):
    """A framework's allocator on the GPUs of this process."""

    reset: Callable[[], None]  # count from here on
    read: Callable[[], tuple[int, ...]]  # the most bytes in use on each GPU since the reset
    release: Callable[[], tuple[int, ...]] | None = None  # give back what isn't in use; the bytes kept on each GPU


class MemoryMeter:
    """Made before the model: on a CPU the growth since then counts, as the allocators there tell nothing."""

    def __init__(self, devices: int, gpus: GpuMemory | None) -> None:
        self._devices, self._gpus = devices, gpus
        if gpus is None:
            _return_unused()
        self._before = _status_bytes("VmRSS") or 0

    def reset(self) -> None:
        """Count from here on; memory that earlier sizes left unused is given back."""
        if self._gpus:
            self._gpus.reset()
            return
        _return_unused()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now

    def read(self) -> tuple[int | None, ...]:
        """Bytes for each device; None where several share one process's memory, or the kernel doesn't say."""
        if self._gpus:
            return self._gpus.read()
        peak = _status_bytes("VmHWM")
        if self._devices != 1 or peak is None:
            return (None,) * self._devices
        return (max(0, peak - self._before),)

    def release(self) -> tuple[int | None, ...]:
        """Give back what isn't in use: the bytes kept on each device; None where that can't be done."""
        if self._gpus and self._gpus.release:
            return self._gpus.release()
        return (None,) * self._devices


def _return_unused() -> None:
    """Give memory that was freed back to the system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
