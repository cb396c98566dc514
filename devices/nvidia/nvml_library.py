"""Load and initialize NVML, list GPUs and MIG instances, and explain NVML's return codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from evener.errors import DeviceError

from ..backend import Listing
from ..types import DENIED, PENDING, UNSUPPORTED, Device, Reading

Library = Any  # the module `pynvml`, or a test double of it
Handle = Any  # NVML's pointer to a device

# NVML's return codes, as nvml.h numbers them
SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

_NEVER = frozenset(
    {INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)
GPU_GONE = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
GONE_WORDS = {
    GPU_IS_LOST: "The GPU is lost: it fell off the bus, or was detached.",
    RESET_REQUIRED: "The GPU needs a reset.",
}
_FAULTS = {
    LIBRARY_NOT_FOUND: (
        "No NVIDIA driver: libnvidia-ml.so.1 is not on this machine.",
        "Install the driver.",
    ),
    DRIVER_NOT_LOADED: (
        "The NVIDIA driver is installed but not loaded.",
        "Load it with modprobe nvidia, or reboot.",
    ),
    VERSION_MISMATCH: (
        "The NVIDIA driver in the kernel and its library have different versions.",
        "Reboot, or reload the kernel modules, after a driver update.",
    ),
    NO_PERMISSION: (
        "This user may not use the NVIDIA driver.",
        "Check the rights on /dev/nvidia*.",
    ),
}
DRIVER_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, VERSION_MISMATCH})

FIRST_WITH_BFLOAT16 = 8  # major compute capability


class GpuHandle(NamedTuple):
    """NVML's handle to a GPU or MIG instance, with the index of the device."""

    handle: Handle
    number: int
    parent: Handle | None = None  # of a MIG instance


def load() -> Library:
    """Import NVML's Python binding, pynvml."""
    import pynvml

    return pynvml


def error_code(error: Exception) -> int:
    """Return NVML's return code in an exception, or `UNKNOWN` if it has none."""
    number = getattr(error, "value", UNKNOWN)
    return number if isinstance(number, int) else UNKNOWN


def failed_reading(code: int) -> Reading:
    """Return the reading for a failed call.

    It is unsupported, denied or, if the call may succeed later, pending.
    """
    if code in _NEVER:
        return UNSUPPORTED
    return DENIED if code == NO_PERMISSION else PENDING


def driver_fault(error: Exception) -> DeviceError:
    """Return a `DeviceError` that explains why the driver can't be used."""
    unknown = (f"The NVIDIA driver does not answer: {error}.", "Check nvidia-smi and dmesg.")
    return DeviceError(*_FAULTS.get(error_code(error), unknown))


@contextmanager
def opened(library: Library | None = None) -> Iterator[Library]:
    """A context manager that initializes NVML, and shuts it down at the end.

    Raises `DeviceError` if the driver can't be used.
    """
    chosen = load() if library is None else library
    try:
        chosen.nvmlInit()
    except chosen.NVMLError as error:
        raise driver_fault(error) from None
    try:
        yield chosen
    finally:
        with suppress(chosen.NVMLError):
            chosen.nvmlShutdown()


def list_gpus() -> Listing:
    """Return all GPUs and MIG instances, with their memory use.

    A GPU in MIG mode is replaced by its instances, which come last. A message names each GPU that
    doesn't answer. Raises `DeviceError` if the driver can't be used.
    """
    devices: list[Device] = []
    used: dict[str, int | None] = {}
    driver = ""
    with opened() as nvml:
        try:
            handles, silent = enumerate_gpus(nvml)
        except nvml.NVMLError as error:
            raise driver_fault(error) from None
        for handle in handles:
            try:
                device = describe(nvml, *handle[:2])
                used[device.id] = memory(nvml, handle.handle)[1]
                devices.append(device)
            except nvml.NVMLError as error:
                silent[handle.number] = error
        with suppress(nvml.NVMLError):
            driver = str(nvml.nvmlSystemGetDriverVersion())
    notes = tuple(f"GPU:{index} does not answer: {silent[index]}." for index in sorted(silent))
    return Listing(tuple(devices), used, notes, driver)


def enumerate_gpus(nvml: Library) -> tuple[list[GpuHandle], dict[int, Exception]]:
    """Return the handles of all GPUs and MIG instances, and the errors of GPUs that failed.

    The errors are keyed by GPU index. A GPU in MIG mode is replaced by its instances, which are
    numbered after the other GPUs. Raises `NVMLError` if the GPUs can't be counted.
    """
    whole: list[GpuHandle] = []
    instances: list[tuple[Handle, Handle]] = []
    silent: dict[int, Exception] = {}
    count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            parts = mig_instances(nvml, handle)
        except nvml.NVMLError as error:
            silent[index] = error
        else:
            instances += [(part, handle) for part in parts or ()]
            whole += [GpuHandle(handle, index)] if parts is None else []
    parts_at_end = [
        GpuHandle(part, count + i, parent) for i, (part, parent) in enumerate(instances)
    ]
    return [*whole, *parts_at_end], silent


def mig_instances(nvml: Library, handle: Handle) -> tuple[Handle, ...] | None:
    """Return the MIG instances of a GPU, or None if it isn't in MIG mode."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != 1:
            return None
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return None
    handles = []
    for slot in range(slots):
        with suppress(nvml.NVMLError):  # an empty slot
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
    return tuple(handles)


def find_gpu(nvml: Library, uuid: str) -> GpuHandle | None:
    """Return the handle of the GPU or MIG instance with this UUID, or None if there is none.

    If it isn't found, but some GPU doesn't answer, the `NVMLError` of that GPU is raised.
    """
    # not NVML's lookup by UUID: for a lost GPU, it would say that there is no such GPU
    handles, silent = enumerate_gpus(nvml)
    for handle in handles:
        try:
            if str(nvml.nvmlDeviceGetUUID(handle.handle)) == uuid:
                return handle
        except nvml.NVMLError as error:
            silent[handle.number] = error
    if silent:
        raise next(iter(silent.values()))
    return None


def describe(nvml: Library, handle: Handle, index: int) -> Device:
    """Return the GPU or MIG instance of a handle as a `Device`.

    Raises `NVMLError` if it doesn't answer.
    """
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    total, _ = memory(nvml, handle)
    name = str(nvml.nvmlDeviceGetName(handle))
    return Device(uuid, index, name, "gpu", total, bfloat16=_has_bfloat16(nvml, handle))


def _has_bfloat16(nvml: Library, handle: Handle) -> bool | None:
    """Return whether the GPU has hardware support for bfloat16, or None if that is unknown."""
    with suppress(nvml.NVMLError):
        major, _ = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        # 8.0 (Ampere) or higher: CUDA C++ programming guide, arithmetic instructions
        return bool(major >= FIRST_WITH_BFLOAT16)
    return None


def memory(nvml: Library, handle: Handle) -> tuple[int | None, int | None]:
    """Return the usable memory and the used memory in bytes.

    Memory that the driver reserves isn't usable. Both are None if NVML can't report them. Raises
    `NVMLError` if the GPU doesn't answer.
    """
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if error_code(error) in _NEVER:
            return None, None
        raise
    return int(found.total) - int(found.reserved), int(found.used)
