"""Locks that keep two searches from using the same run or device at the same time.

The user may allow several searches on a device. The locks are file locks of the kernel (flock),
which it releases when the process that holds them exits. Searches of one user lock files in the
user's state folder. Each file contains the pid and the run of the process that holds the lock.

Searches of different users, or with different state folders, lock the file that represents a device
in sysfs. Everybody can read this file and nobody can replace it, so nobody can tamper with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path

from evener.devices.cluster.agents import find_agent
from evener.devices.registry import find_backend
from evener.devices.types import Device, group_by_host
from evener.errors import DeviceError, RequestError, as_request_error
from evener.system.files import runs_folder, state_folder, trusted_folder

from ..request import Job

SYS = Path("/sys")
LOCKS = Path("/proc/locks")
LARGEST_LOCKS_BYTES = 4 << 20
LARGEST_NOTE_BYTES = 4096
TRIES = 3  # attempts to get a lock whose holder has gone by the time it is looked up
PAUSE_SECONDS = 0.01  # seconds between two attempts to lock one of this user's files
REMEDY = "Wait for it, or use --share to run beside it."
Note = dict[str, object]  # the holder of a lock: pid and run


def lock_run(folder: Path) -> ExitStack:
    """Lock a run's folder until the result is closed.

    Raises RequestError if another process has locked it.
    """
    with ExitStack() as held:
        holder = _lock_own_file(held, folder / "lock", {"pid": os.getpid()})
        if holder is not None:
            raise RequestError(
                f"The run {folder.name} is going on{_describe_note(holder)}.",
                "Wait for it, or stop it there.",
            )
        return held.pop_all()


def is_running(run: str) -> bool:
    """Return whether any process is working on the run."""
    # such a process holds the run's lock
    try:
        descriptor = os.open(
            runs_folder() / run / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        )
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)


def lock_job(job: Job, positions: Iterable[int] | None = None, run: str = "") -> ExitStack:
    """Lock a job's devices, or only those at `positions`, until the result is closed.

    Nothing is locked for simulated devices, or if the user gave `--share`. Raises DeviceError if a
    device is in use.
    """
    if job.request.share or job.machine is not None:
        return ExitStack()
    return lock_devices(
        run, job.devices if positions is None else [job.devices[position] for position in positions]
    )


def lock_devices(run: str, devices: Sequence[Device]) -> ExitStack:
    """Lock devices, on this host and on others, until the result is closed.

    Raises DeviceError if another search has locked one of them.
    """
    with ExitStack() as held:
        for host, own in group_by_host(devices).items():
            if host:
                held.callback(find_agent(host).keep(lock_here, run, own).close)
            else:
                held.enter_context(lock_here(run, own))
        return held.pop_all()


def lock_here(run: str, devices: Sequence[Device]) -> ExitStack:
    """Lock devices of this host, so that no other search by any user can use them.

    Raises DeviceError if one is locked, and RequestError if a lock file can't be written.
    """
    folder = trusted_folder(state_folder() / "locks")
    with ExitStack() as held:
        for device in devices:
            for unit in _lock_units(device):
                path = folder / f"{blake2b(unit.encode(), digest_size=12).hexdigest()}.lock"
                holder = _lock_own_file(held, path, {"pid": os.getpid(), "run": run})
                if holder is not None:
                    who = _describe_note(holder)
                    raise DeviceError(
                        f"{device.label} is being measured by another evener{who}.", REMEDY
                    )
        held.enter_context(lock_kernel_files(devices))
        return held.pop_all()


def lock_kernel_files(devices: Iterable[Device]) -> ExitStack:
    """Lock the devices' files in sysfs, which the searches of all users can see.

    Raises DeviceError if one of them is locked already.
    """
    with ExitStack() as held:
        for device in devices:
            for path in kernel_files(device):
                _lock_kernel_file(held, device, path)
        return held.pop_all()


def _lock_own_file(locks: ExitStack, path: Path, note: Note) -> Note | None:
    """Lock a file, and write into it who holds the lock.

    Returns None on success. If the file is locked already, returns its holder. `locks` collects the
    lock, which is held until `locks` is closed. Raises RequestError if the file can't be written.
    """
    remedy = (
        "Make room there, or set XDG_STATE_HOME to a folder of a local disk that you may write."
    )
    with as_request_error(f"The lock {path} can't be taken", remedy):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        locks.callback(os.close, descriptor)
        try:
            _lock(descriptor)
        except BlockingIOError:
            return _read_note(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)
    return None


def _lock_kernel_file(locks: ExitStack, device: Device, path: Path) -> None:
    """Lock a device's file in sysfs, so that searches of other users see that it is in use.

    Nothing happens if the file can't be opened. Raises DeviceError if it is locked already.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        locks.callback(os.close, descriptor)
        pid = try_lock(descriptor)
        if pid is not None and pid != os.getpid():
            whose = "another evener"
            if not pid or _user_id(pid) != os.getuid():
                whose = "another user's evener"
            who = _describe_process(pid)
            raise DeviceError(f"{device.label} is being measured by {whose}{who}.", REMEDY)


def kernel_files(device: Device) -> list[Path]:
    """Return the files in sysfs that are locked for a device: one per core, or one for a GPU."""
    if device.on_cpu:
        return [SYS / f"devices/system/cpu/cpu{core}/topology/core_id" for core in device.cores]
    address = find_backend(device.kind).bus_address(device)
    return [SYS / "bus/pci/devices" / address / "vendor"] if address else []


def try_lock(descriptor: int) -> int | None:
    """Try to lock an open file.

    Returns None on success, else the process id of the lock's holder, which is 0 if it is unknown.
    """
    for _ in range(TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            pid = find_holder(descriptor)
            if pid:
                return pid
    return 0


def find_holder(descriptor: int) -> int:
    """Return the id of the process that has locked an open file, or 0 if none is found."""
    status = os.fstat(descriptor)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError, IndexError), LOCKS.open("rb") as stream:
        text = stream.read(LARGEST_LOCKS_BYTES).decode(errors="replace")
        for line in text.splitlines():
            words = line.split()
            if wanted in words:
                return int(words[4])
    return 0


def _lock(descriptor: int) -> None:
    """Lock an open file, trying a few times.

    Raises BlockingIOError if it stays locked.
    """
    # `is_running` in another process also locks the file for a moment
    for _ in range(TRIES - 1):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(PAUSE_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_units(device: Device) -> list[str]:
    """Return the names to lock for a device: one for each core of a CPU device, one for a GPU."""
    # two CPU slices that overlap exclude each other
    return [f"core {core}" for core in device.cores] if device.on_cpu else [device.id]


def _read_note(descriptor: int) -> Note:
    try:
        note = json.loads(os.pread(descriptor, LARGEST_NOTE_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _describe_note(note: Note) -> str:
    """Describe who holds a lock, such as " (process 12, run x)"; "" if that is unknown."""
    pid = note.get("pid")
    run = note.get("run")
    # the file may have been changed, so fields that evener wouldn't have written are left out
    words = [f"process {pid}"] if isinstance(pid, int) else []
    if (
        isinstance(run, str)
        and 0 < len(run) <= 40
        and run.replace("-", "").isalnum()
        and run.isascii()
    ):
        words.append(f"run {run}")
    return f" ({', '.join(words)})" if words else ""


def _describe_process(pid: int) -> str:
    if not pid:
        return ""
    user = _user_id(pid)
    name = ""
    with suppress(KeyError):
        name = f" of {pwd.getpwuid(user).pw_name}" if user is not None else ""
    return f" (process {pid}{name})"


def _user_id(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
