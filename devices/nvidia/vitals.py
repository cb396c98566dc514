"""The vitals of one GPU by NVML: seconds held back, energy, memory and its holders."""

from __future__ import annotations

import time
from contextlib import suppress

from ..types import Device
from ..vitals import Vitals
from .gpu_reader import GpuReader
from .nvml_calls import DriverGoneError, GpuGoneError
from .nvml_library import GONE_WORDS, driver_fault, error_code, find_handle, load


class NvmlVitals:
    """The vitals of a GPU by its UUID; NVML is opened at the first reading, and again after trouble."""

    def __init__(self, device: Device) -> None:
        self._device, self._nvml = device, load()
        self._open = False
        self._reader: GpuReader | None = None

    def read(self, full: bool) -> Vitals:
        """One reading; it never raises for what the driver does."""
        nvml = self._nvml
        try:
            if self._reader is None:
                nvml.nvmlInit()
                self._open = True
                handle = find_handle(nvml, self._device.id)
                if handle is None:
                    raise GpuGoneError
                self._reader = GpuReader(nvml, handle, self._device)
            return self._reader.vitals(full)
        except (GpuGoneError, DriverGoneError) as gone:
            words = str(gone)
        except nvml.NVMLError as error:
            words = GONE_WORDS.get(error_code(error)) or driver_fault(error).message
        self.close()
        return Vitals(time.monotonic(), trouble=words)

    def close(self) -> None:
        """Shut NVML down."""
        self._reader = None
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
