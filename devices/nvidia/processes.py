"""The processes on one GPU, with their memory and share of the multiprocessors, asked every few seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..host.snapshot_builder import OnDevice
from ..types import UNSUPPORTED, Reading, value
from .nvml_calls import raise_if_gone
from .nvml_library import NOT_FOUND, SUCCESS, Handle, Library, error_code, failed_reading

PERIOD_SECONDS = 2.5
GRAPHICS_EVERY = 4  # of these periods: on a desktop this call takes 4.5 ms
USE_EVERY = 2  # of these periods, while the processes stay the same: 2 ms on an H200
FIRST_WINDOW_MICROSECONDS = 3_000_000  # of the driver's buffer, at the first look
LISTS = {
    "compute": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}


class GpuProcesses:
    """The process table of one GPU; keeps the last answer between two readings and through passing failures."""

    def __init__(self, nvml: Library, handle: Handle, is_mig: bool) -> None:
        self._nvml, self._handle, self._is_mig = nvml, handle, is_mig
        self._due = 0.0
        self._looks = 0
        self._memory: dict[str, dict[int, int | None]] = {"compute": {}, "graphics": {}}
        self._use: tuple[Mapping[int, float], Reading] = {}, UNSUPPORTED  # by pid, and of the others
        self._since = 0  # the driver's own time of the newest use sample, in microseconds
        self._seen: tuple[OnDevice, ...] = ()

    def read(self, now: float) -> Sequence[OnDevice]:
        """The processes now; GpuGoneError or DriverGoneError if there is nothing left to ask."""
        if now < self._due:
            return self._seen
        self._due = now + PERIOD_SECONDS
        self._list("compute")
        if self._looks % GRAPHICS_EVERY == 0 and not self._is_mig:
            self._list("graphics")
        memory = {**self._memory["graphics"], **self._memory["compute"]}
        if self._looks % USE_EVERY == 0 or memory.keys() != {each.pid for each in self._seen}:
            self._use = self._ask_use() if memory else ({}, UNSUPPORTED)
        self._looks += 1
        use, otherwise = self._use
        self._seen = tuple(
            OnDevice(
                pid,
                UNSUPPORTED if used is None else value(used),
                value(use[pid]) if pid in use else otherwise,
            )
            for pid, used in sorted(memory.items())
        )
        return self._seen

    def _list(self, kind: str) -> None:
        """Ask for the processes by the newest version of the call that this driver has."""
        for name in LISTS[kind]:
            try:
                listed = getattr(self._nvml, name)(self._handle)
            except AttributeError:
                continue
            except self._nvml.NVMLError as error:
                code = error_code(error)
                raise_if_gone(code)
                if failed_reading(code) is UNSUPPORTED:
                    continue
                return
            self._memory[kind] = {int(each.pid): each.usedGpuMemory for each in listed}
            return

    def _ask_use(self) -> tuple[dict[int, float], Reading]:
        """Percent of the multiprocessors by pid, and what holds for the others: the driver lists only busy ones."""
        try:
            samples: Sequence[Any] = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._since)
        except self._nvml.NVMLError as error:
            code = error_code(error)
            raise_if_gone(code)
            if code in (SUCCESS, NOT_FOUND) and not self._is_mig:  # the binding raises for an empty list too
                return {}, value(0.0)
            return {}, failed_reading(code)
        newest = max((int(each.timeStamp) for each in samples), default=self._since)
        start = self._since or newest - FIRST_WINDOW_MICROSECONDS
        self._since = newest
        parts: dict[int, list[int]] = {}
        for each in samples:
            if each.timeStamp > start and each.smUtil <= 100:
                parts.setdefault(int(each.pid), []).append(int(each.smUtil))
        return {pid: sum(numbers) / len(numbers) for pid, numbers in parts.items()}, value(0.0)
