"""Read the metrics and error events of NVIDIA GPUs through NVML."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from evener.errors import DeviceError

from ..snapshot_builder import DeviceUse, SnapshotBuilder
from ..types import LOST, Device, DeviceSample, Reading, Snapshot, State
from .gpu_reader import GpuReader
from .nvml_calls import DriverGoneError, GpuGoneError
from .nvml_library import (
    GONE_WORDS,
    TIMEOUT,
    UNINITIALIZED,
    GpuHandle,
    Handle,
    Library,
    describe,
    driver_fault,
    enumerate_gpus,
    error_code,
    find_gpu,
    load,
)

RETRY_GPU_SECONDS = 5.0
RETRY_DRIVER_SECONDS = 2.0
REOPEN_FOR_LOST_SECONDS = 60.0  # a GPU that was reset is listed only after NVML is reinitialized
DENIED_WORDS = "This user may not read this GPU; check the rights on /dev/nvidia*."
SILENT_WORDS = (
    "The driver answers but reports nothing about this GPU; in a container, access to "
    "it may have been revoked."
)


class _Slot:
    """One of the GPUs that an NvmlSource reads. It has a reader as long as the GPU answers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reader: GpuReader | None = None
        self.note = ""
        self.retry_at = 0.0
        self.events: tuple[str, ...] = ()
        # first value of the energy counter, which outlives the reader
        self.first_joules: float | None = None


class NvmlSource:
    """Reads the metrics of NVIDIA GPUs, and recovers if a GPU or the driver is lost.

    If `devices` is None, all GPUs are read. Not thread-safe. Raises `DeviceError` if the driver
    can't be opened when this object is created; later failures appear in the samples.
    """

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        notes: tuple[str, ...] = (),
        library: Library | None = None,
        builder: SnapshotBuilder | None = None,
    ) -> None:
        self._nvml = load() if library is None else library
        self._builder = builder or SnapshotBuilder()
        self._notes = notes
        self._wanted = None if devices is None else {device.id for device in devices}
        self._slots = {device.id: _Slot(device) for device in devices or ()}
        self._events: EventWatch | None = None
        self._is_open = False
        self._driver = ""
        self._trouble = ""
        self._retry_at = 0.0
        self._reopen_at = 0.0
        self._looks = 0
        self._open(self._builder.begin())

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs, including lost ones."""
        return tuple(slot.device for slot in self._slots.values())

    def sample(self) -> Snapshot:
        """Read all GPUs and their processes. Every few seconds, lost GPUs are tried again."""
        now = self._builder.begin()
        self._reopen_if_lost(now)
        self._watch_events()
        found = {identity: self._sample(slot, now) for identity, slot in self._slots.items()}
        seen = {identity: processes for identity, (_, processes) in found.items()}
        notes = (*self._notes, *([self._trouble] if self._trouble else []))
        return self._builder.snapshot(
            [sample for sample, _ in found.values()], notes, seen, self._driver
        )

    def close(self) -> None:
        """Close NVML, and stop the thread that waits for events.

        This takes up to two seconds.
        """
        if not self._is_open:
            return
        self._is_open = False
        for slot in self._slots.values():
            _drop(slot)
        if self._events is None or self._events.close():
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._events = None

    def _open(self, now: float) -> None:
        """Initialize NVML, and create a reader for each GPU.

        Raises `DeviceError` if the driver can't be used.
        """
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            self._is_open = True
            self._driver = str(nvml.nvmlSystemGetDriverVersion())
            handles, _ = enumerate_gpus(nvml)
        except nvml.NVMLError as error:
            self.close()
            raise driver_fault(error) from None
        self._reopen_at = now + REOPEN_FOR_LOST_SECONDS
        self._looks = 0
        for gpu in handles:
            with suppress(nvml.NVMLError):
                self._attach(gpu)

    def _watch_events(self) -> None:
        """Start the thread that waits for errors of GPUs, but not before the third call.

        A program that takes only one sample then doesn't have to wait for the thread when it ends.
        """
        self._looks += 1
        if self._is_open and self._events is None and self._looks > 2:
            self._events = EventWatch(
                self._nvml, [slot.reader.handle for slot in self._slots.values() if slot.reader]
            )

    def _attach(self, gpu: GpuHandle) -> None:
        nvml, (handle, index, parent) = self._nvml, gpu
        device = describe(nvml, handle, index)
        if self._wanted is not None and device.id not in self._wanted:
            return
        slot = self._slots.setdefault(device.id, _Slot(device))
        slot.reader = GpuReader(nvml, handle, slot.device, parent)
        slot.reader.first_joules = slot.first_joules
        slot.note = ""

    def _reopen_if_lost(self, now: float) -> None:
        """Open NVML again if the driver is gone, and every minute while a GPU is lost."""
        lost = [slot for slot in self._slots.values() if slot.reader is None]
        # a GPU that was reset is listed again only after the driver has been reopened
        if self._is_open and lost and now >= self._reopen_at:
            self._lose_driver(now, "")
        if not self._is_open and now >= self._retry_at:
            self._retry_at = now + RETRY_DRIVER_SECONDS
            try:
                self._open(now)
                self._trouble = ""
            except DeviceError as fault:
                self._trouble = str(fault)

    def _sample(self, slot: _Slot, now: float) -> tuple[DeviceSample, Sequence[DeviceUse]]:
        if slot.reader is None and self._is_open and now >= slot.retry_at:
            self._find_again(slot, now)
        if slot.reader is not None:
            slot.events = self._events.recent(slot.reader.handle) if self._events else ()
            try:
                sample = slot.reader.sample(now)
                processes = slot.reader.processes.read(now)
            except GpuGoneError as gone:
                self._mark_lost(slot, str(gone), now)
            except DriverGoneError as gone:
                self._lose_driver(now, str(gone))
            else:
                note = sample.note or explain_unreadable(sample)
                return msgspec.structs.replace(sample, events=slot.events, note=note), processes
        return lost_sample(
            slot.device, slot.note or self._trouble or "The GPU does not answer.", slot.events
        ), ()

    def _find_again(self, slot: _Slot, now: float) -> None:
        slot.retry_at = now + RETRY_GPU_SECONDS
        try:
            gpu = find_gpu(self._nvml, slot.device.id)
            if gpu:
                self._attach(gpu)
        except self._nvml.NVMLError as error:
            slot.note = GONE_WORDS.get(error_code(error), slot.note)

    def _mark_lost(self, slot: _Slot, words: str, now: float) -> None:
        _drop(slot)
        slot.note = words
        slot.retry_at = now + RETRY_GPU_SECONDS
        self._reopen_at = max(self._reopen_at, now + REOPEN_FOR_LOST_SECONDS)

    def _lose_driver(self, now: float, words: str) -> None:
        self._trouble = words or self._trouble
        self.close()
        self._retry_at = now


def lost_sample(device: Device, note: str, events: tuple[str, ...] = ()) -> DeviceSample:
    """Return a sample for a lost device.

    All readings except for the training throughput are marked as lost. `note` says what is wrong,
    and `events` are the device's latest errors.
    """
    lost = {
        field.name: LOST
        for field in msgspec.structs.fields(DeviceSample)
        if isinstance(field.default, Reading) and field.name != "samples_per_second"
    }
    return DeviceSample(device=device, note=note, events=events, **lost)  # type: ignore[arg-type]


def explain_unreadable(sample: DeviceSample) -> str:
    """Return a message that says why a GPU's use, memory, temperature and clock can't be read.

    Returns "" if any of them can be read, or if none of these readings is denied or stale.
    """
    vital = (
        sample.utilization_percent,
        sample.memory_used_bytes,
        sample.temperature_celsius,
        sample.clock_mhz,
    )
    if any(reading.current is not None for reading in vital):
        return ""
    states = {reading.state for reading in vital}
    if State.DENIED in states:
        return DENIED_WORDS
    return SILENT_WORDS if State.STALE in states else ""


def _drop(slot: _Slot) -> None:
    if slot.reader is not None:
        slot.first_joules = slot.reader.first_joules
        slot.reader.close()
    slot.reader = None


WAIT_MILLISECONDS = 250
JOIN_SECONDS = 1.5
KEPT = 5  # newest events kept for each GPU
XID = 0x8
DOUBLE_BIT = 0x2
SINGLE_BIT_STORM = 0x200
UNAVAILABLE = 0x4000
RECOVERY = 0x8000
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
    """Collects XID and ECC errors of GPUs, in a background thread."""

    def __init__(self, nvml: Library, handles: Sequence[Handle]) -> None:
        self._nvml = nvml
        self._stop = threading.Event()
        self._events: dict[int, deque[str]] = {
            address(handle): deque(maxlen=KEPT) for handle in handles
        }
        self._set = self._register(handles)
        self._thread: threading.Thread | None = None
        if self._set is not None:
            self._thread = threading.Thread(
                target=self._run, name="evener-nvml-events", daemon=True
            )
            self._thread.start()

    def recent(self, handle: Handle) -> tuple[str, ...]:
        """Return up to five of the latest events of a GPU, the newest last."""
        return tuple(self._events.get(address(handle), ()))

    def close(self) -> bool:
        """Stop the thread, and return True if it has ended. Only then may NVML be shut down."""
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
        nvml = self._nvml
        registered = False
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
                f"{time.strftime('%H:%M:%S')} {describe_event(event.eventType, event.eventData)}"
            )


def describe_event(kind: int, data: int) -> str:
    """Return text about an event, such as "XID 79: GPU has fallen off the bus"."""
    if kind == XID:
        return f"XID {data}" + (f": {XIDS[data]}" if data in XIDS else "")
    return KINDS.get(kind, f"event 0x{kind:x}")


def address(handle: Handle) -> int:
    """Return a handle as an integer, so that handles from different calls can be compared."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except (ctypes.ArgumentError, TypeError):
        return id(handle)
