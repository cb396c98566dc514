"""No two users' sessions on one device: a lock on the file that the kernel itself shows the device by.

Such a file can be read by every user, written by none and replaced by nobody, so nothing is laid where others could
tamper with it; the lock (flock) ends with its process. One's own sessions are kept apart by `store.runs`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from evener.devices.types import Device
from evener.errors import DeviceError

SYS = Path("/sys")
LOCKS = Path("/proc/locks")
MOST_LOCKS_BYTES = 4 << 20
TRIES = 3  # at a lock that nobody has any more when it is looked for


class MachineLock:
    """Held until `release`; DeviceError if another user has one of the devices. Simulated devices are nobody's."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._descriptors: list[int] = []
        for device in devices:
            for path in kernel_files(device):
                self._take(device, path)

    def release(self) -> None:
        """Let go of all; it may be called twice."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _take(self, device: Device, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return
        try:
            pid = taken_by(descriptor)
        except OSError:  # a file system without locks
            os.close(descriptor)
            return
        if pid is None:
            self._descriptors.append(descriptor)
            return
        os.close(descriptor)
        if pid and _user_id(pid) == os.getuid():
            return
        self.release()
        raise DeviceError(
            f"{device.label} is being measured by another user's evener{_words(pid)}.",
            "Wait for it, or run beside it with --share.",
        )


def kernel_files(device: Device) -> list[Path]:
    """What the kernel shows a device by: one file for each core, or the GPU's own on its bus; none if unknown."""
    if device.kind == "cpu":
        return [SYS / f"devices/system/cpu/cpu{core}/topology/core_id" for core in device.cores]
    if device.kind != "gpu" or device.id.startswith("MIG-"):  # the instances of a GPU may be in several hands
        return []
    address = _bus_address(device.id)
    return [SYS / "bus/pci/devices" / address / "vendor"] if address else []


def taken_by(descriptor: int) -> int | None:
    """Lock an open file: None if that was done, else the pid of whoever has it; 0 where the kernel doesn't say."""
    for _ in range(TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if pid := holder(descriptor):
                return pid
    return 0


def holder(descriptor: int) -> int:
    """The pid of whoever has the lock on an open file; 0 where the kernel doesn't say."""
    status = os.fstat(descriptor)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError, IndexError), LOCKS.open("rb") as stream:
        lines = stream.read(MOST_LOCKS_BYTES).decode(errors="replace").splitlines()
        return next((int(words[4]) for line in lines if wanted in (words := line.split())), 0)
    return 0


def _user_id(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _words(pid: int) -> str:
    import pwd

    if not pid:
        return ""
    user = _user_id(pid)
    name = ""
    with suppress(KeyError):
        name = f" of {pwd.getpwuid(user).pw_name}" if user is not None else ""
    return f" (process {pid}{name})"


def _bus_address(uuid: str) -> str:
    """As sysfs writes it: 0000:3b:00.0; empty if the driver doesn't tell."""
    from evener.devices.nvidia.nvml_library import find_handle, opened

    try:
        with opened() as nvml:
            told = nvml.nvmlDeviceGetPciInfo(find_handle(nvml, uuid)).busId
        domain, rest = (told.decode() if isinstance(told, bytes) else str(told)).split(":", 1)
        return f"{int(domain, 16):04x}:{rest.lower()}"
    except Exception:  # whatever the driver raises: the lock of one's own sessions stands in any case
        return ""
