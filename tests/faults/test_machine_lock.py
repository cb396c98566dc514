"""Two users, or two state folders, on one device: the kernel's own file of the device is locked.

The second one learns who holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store import locks
from evener.balancer.store.locks import find_holder, kernel_files, lock_kernel_files
from evener.devices.cpu import slices
from evener.devices.discover import discover
from evener.devices.types import Device
from evener.errors import DeviceError

SOMEBODY = 12345
Hold = Callable[..., int]


@pytest.fixture
def kernel_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files for all cores like the kernel's: readable by all, and unlocked."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(locks, "SYS", Path(folder))
        for path in (path for each in slices() for path in kernel_files(each)):
            path.parent.mkdir(parents=True)
            path.touch(mode=0o444)
        yield


@pytest.fixture
def somebody(kernel_cores: None) -> Iterator[Hold]:
    """Forks a process, by default of another user, that takes the lock and holds it."""
    born: list[int] = []

    def hold(devices: tuple[Device, ...], user: int = SOMEBODY) -> int:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.setuid(user)
                lock_kernel_files(devices)
                os.write(writing, b"held")
                signal.pause()
            finally:  # the child must never return into the tests
                os._exit(0)
        born.append(pid)
        os.close(writing)
        assert os.read(reading, 4) == b"held"
        os.close(reading)
        return pid

    yield hold
    for pid in born:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_core_that_somebody_else_measures_on_is_not_taken(somebody: Hold) -> None:
    """The holder is named; other cores are free, and so are all with --share or after its exit."""
    first, *others = slices()
    pid = somebody((first,))
    with pytest.raises(
        DeviceError, match=rf"CPU:0 is being measured by another user's evener \(process {pid}\)"
    ) as fault:
        Session(open_run(Request(devices="cpu", workload="synthetic")))
    assert "--share" in fault.value.remedy
    lock_kernel_files(others).close()
    Session(open_run(Request(devices="cpu", workload="synthetic", share=True))).close()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    Session(open_run(Request(devices="cpu", workload="synthetic"))).close()


def test_one_user_with_another_state_folder_is_somebody_else(somebody: Hold) -> None:
    """The same user with another HOME or XDG_STATE_HOME, or root, counts as another holder."""
    first, *others = slices()
    pid = somebody((first,), os.getuid())
    with pytest.raises(
        DeviceError, match=rf"CPU:0 is being measured by another evener \(process {pid}[) ]"
    ) as fault:
        Session(open_run(Request(devices="cpu", workload="synthetic")))
    assert "--share" in fault.value.remedy
    lock_kernel_files(others).close()
    Session(open_run(Request(devices="cpu", workload="synthetic", share=True))).close()


def test_the_kernel_has_a_file_of_each_core_and_says_who_locks_it() -> None:
    """Everybody may read and lock the file; the tested one isn't used by sessions."""
    path = Path("/sys/devices/system/cpu/online")
    if not path.exists():
        pytest.skip("no sysfs here")
    assert Path("/sys/devices/system/cpu/cpu0/topology/core_id").exists()
    with path.open() as mine, path.open() as other:
        fcntl.flock(mine, fcntl.LOCK_EX)
        assert find_holder(other.fileno()) == os.getpid()


def test_a_lock_that_is_let_go_while_its_holder_is_looked_for_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A lock released meanwhile is taken; one whose holder is never found stays taken."""
    path = tmp_path / "core"
    path.touch()
    first, second = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    monkeypatch.setattr(locks, "find_holder", lambda _: 0)
    assert locks.try_lock(second) == 0

    def let_go(_: int) -> int:
        fcntl.flock(first, fcntl.LOCK_UN)
        return 0

    monkeypatch.setattr(locks, "find_holder", let_go)
    assert locks.try_lock(second) is None
    os.close(first)
    os.close(second)


def test_a_gpu_is_certain_by_its_place_on_the_bus(
    fake_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU is identified by its PCI address, whatever its number or UUID.

    A GPU without an address from the driver, or unknown to sysfs, isn't locked.
    """
    double = fake_nvml(2)
    gpus = discover("gpu").devices
    monkeypatch.setattr(locks, "SYS", tmp_path)
    assert kernel_files(gpus[0]) == []
    double.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(
        busId=f"0000000{double.gpus.index(handle.gpu)}:3B:00.0"
    )
    (path,) = kernel_files(gpus[1])
    assert path == tmp_path / "bus/pci/devices/0001:3b:00.0/vendor"
    lock_kernel_files(gpus).close()
    path.parent.mkdir(parents=True)
    path.write_text("0x10de")
    held = lock_kernel_files(gpus)
    lock_kernel_files(gpus).close()  # the process's own locks don't block it
    me, pid = pwd.getpwuid(os.getuid()).pw_name, os.getpid()
    with monkeypatch.context() as another:
        another.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(DeviceError, match=rf"GPU:1 .* evener \(process {pid} of {me}\)"):
            lock_kernel_files(gpus)
    held.close()
    held.close()
    lock_kernel_files(gpus).close()


def test_simulated_devices_are_not_locked() -> None:
    """Any number of sessions can use simulated devices at the same time."""
    assert [kernel_files(device) for device in discover("sim:t4,t4").devices] == [[], []]
