"""The MPS daemon of our own ends with us, however we end; NVIDIA's program is played by a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from devices.mps import PROGRAM, MpsDaemon, find_program
from evener.errors import DeviceError

SCRIPT = """#!{python}
import os, signal, subprocess, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
pid_file = os.path.join(folder, "pid")
if sys.argv[1:] == ["-d"]:
    if {fails}:
        sys.exit("no GPU here")
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "nvidia-cuda-mps-server"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    open(pid_file, "w").write(str(server.pid))
elif sys.stdin.readline().startswith("quit") and not {deaf}:
    os.kill(int(open(pid_file).read()), signal.SIGTERM)
"""
HOLDER = """
import sys, time
from devices.mps import MpsDaemon
daemon = MpsDaemon()
print(daemon.variables()["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
time.sleep(600)
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a program of NVIDIA's name first on the path."""

    def put(fails: bool = False, deaf: bool = False) -> None:
        program = tmp_path / PROGRAM
        program.write_text(SCRIPT.format(python=sys.executable, fails=fails, deaf=deaf))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def server_of(folder: str) -> psutil.Process:
    """The played server of the daemon in a folder."""
    return psutil.Process(int((Path(folder) / "pid").read_text()))


def gone(process: psutil.Process, folder: str, seconds: float = 15.0) -> bool:
    """Whether both end within a time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        if not alive and not Path(folder).exists():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("deaf", [False, True])
def test_a_closed_daemon_is_gone_with_its_folder(install: Install, deaf: bool) -> None:
    """Also one that does not listen to `quit`."""
    install(deaf=deaf)
    daemon = MpsDaemon()
    folder = daemon.variables()["CUDA_MPS_PIPE_DIRECTORY"]
    server = server_of(folder)
    assert daemon.variables()["CUDA_MPS_PIPE_DIRECTORY"] == folder, "it is started once"
    daemon.close()
    daemon.close()
    assert gone(server, folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_process_that_holds_it(install: Install, number: signal.Signals) -> None:
    install()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert holder.stdout is not None
    folder = holder.stdout.readline().strip()
    server = server_of(folder)
    holder.send_signal(number)
    holder.wait(10)
    holder.stdout.close()
    assert gone(server, folder)


def test_a_daemon_that_does_not_start_says_why(install: Install) -> None:
    install(fails=True)
    with pytest.raises(DeviceError, match="no GPU here"):
        MpsDaemon().variables()


def test_without_the_program_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program() is None
    with pytest.raises(DeviceError, match="not installed"):
        MpsDaemon().variables()


def test_a_daemon_that_was_never_needed_closes_quietly() -> None:
    MpsDaemon().close()
