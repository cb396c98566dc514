"""XID errors, ECC errors and lost GPUs as the driver reports them, read by a thread that never delays an exit."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .nvml_library import TIMEOUT, UNINITIALIZED, Handle, Library, error_code

WAIT_MILLISECONDS = 250
JOIN_SECONDS = 1.5
KEPT = 5  # events for each GPU
XID, DOUBLE_BIT, SINGLE_BIT_STORM, UNAVAILABLE, RECOVERY = 0x8, 0x2, 0x200, 0x4000, 0x8000
KINDS = {
    DOUBLE_BIT: "uncorrectable memory error (ECC)",
    SINGLE_BIT_STORM: "many correctable memory errors (ECC)",
    UNAVAILABLE: "GPU unavailable",
    RECOVERY: "recovery action changed",
}
XIDS = {  # NVIDIA's "XID errors" document
    13: "illegal instruction or address in a kernel",
    31: "illegal memory access",
    43: "a program's channel was stopped",
    45: "a program's work was ended early",
    48: "uncorrectable memory error",
    61: "internal micro-controller halt",
    62: "internal micro-controller halt",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many correctable memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    154: "recovery action changed",
}


class EventWatch:
    """Events of all GPUs, from its creation until `close`."""

    def __init__(self, nvml: Library, handles: Sequence[Handle]) -> None:
        self._nvml = nvml
        self._stop = threading.Event()
        self._events: dict[int, deque[str]] = {address(handle): deque(maxlen=KEPT) for handle in handles}
        self._set = self._register(handles)
        self._thread: threading.Thread | None = None
        if self._set is not None:
            self._thread = threading.Thread(target=self._run, name="evener-nvml-events", daemon=True)
            self._thread.start()

    def recent(self, handle: Handle) -> tuple[str, ...]:
        """The last events of this GPU, newest last."""
        return tuple(self._events.get(address(handle), ()))

    def close(self) -> bool:
        """End the thread and free the set; False if the driver still holds the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                return False
        if self._set is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._set)
            self._set = None
        return True

    def _register(self, handles: Sequence[Handle]) -> Any:
        nvml, registered = self._nvml, False
        try:
            event_set = nvml.nvmlEventSetCreate()
        except (nvml.NVMLError, AttributeError):
            return None
        for handle in handles:
            with suppress(nvml.NVMLError):
                wanted = (XID | sum(KINDS)) & nvml.nvmlDeviceGetSupportedEventTypes(handle)
                if wanted:
                    nvml.nvmlDeviceRegisterEvents(handle, wanted, event_set)
                    registered = True
        if registered:
            return event_set
        with suppress(nvml.NVMLError):
            nvml.nvmlEventSetFree(event_set)
        return None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, WAIT_MILLISECONDS)
            except self._nvml.NVMLError as error:
                code = error_code(error)
                if code == UNINITIALIZED:
                    return
                if code != TIMEOUT:
                    self._stop.wait(1.0)
                continue
            self._events.get(address(event.device), deque[str]()).append(
                f"{time.strftime('%H:%M:%S')} {describe(event.eventType, event.eventData)}"
            )


def describe(kind: int, data: int) -> str:
    """An event in words."""
    if kind == XID:
        return f"XID {data}" + (f": {XIDS[data]}" if data in XIDS else "")
    return KINDS.get(kind, f"event 0x{kind:x}")


def address(handle: Handle) -> int:
    """The pointer that NVML gave for a handle, which identifies the GPU."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except (ctypes.ArgumentError, TypeError):
        return id(handle)
