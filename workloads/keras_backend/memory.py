"""Peak memory of a TensorFlow process on its devices, and what the figure means."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import tensorflow as tf


class PeakMemory:
    """Made before the model: on a CPU the growth since then counts, as its allocator tells nothing."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._gpu = any(name.startswith("GPU") for name in self._devices)
        self._before = _status_bytes("VmRSS") or 0
        self.meaning = "peak of TensorFlow's allocator" if self._gpu else "growth of the process' peak resident memory"

    def reset(self) -> None:
        """Count from here on."""
        if self._gpu:
            for name in self._devices:
                tf.config.experimental.reset_memory_stats(name)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now

    def settle(self) -> None:
        """The first step of a size is done: on GPUs, count from here on, as trying kernels out takes what is free."""
        if self._gpu:
            self.reset()

    def read(self) -> tuple[int | None, ...]:
        """Bytes for each device; None where several share one process' memory, or nobody can tell."""
        if self._gpu:
            return tuple(int(tf.config.experimental.get_memory_info(name)["peak"]) for name in self._devices)
        peak = _status_bytes("VmHWM")
        if len(self._devices) != 1 or peak is None:
            return (None,) * len(self._devices)
        return (max(0, peak - self._before),)


def _status_bytes(key: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
