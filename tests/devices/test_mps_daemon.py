"""The MPS daemon of our own ends with us, however we end; NVIDIA's program is played by a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from evener.devices.nvidia.mps import PROGRAM, MpsDaemon, find_program
from evener.errors import DeviceError
from tests.support.cores import two_cores

pytestmark = pytest.mark.usefixtures("cores_of_one_user")

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
from evener.devices.nvidia.mps import MpsDaemon
daemon = MpsDaemon()
print(daemon.variables()["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
time.sleep(600)
"""
COMPARISON = """
import sys
from evener.balancer import intake
from evener.balancer.search import budget
from evener.devices.cpu import CpuSlices
from evener.devices.nvidia.mps import MpsDaemon
from evener.tui.cli.main import run
budget.BASE_SECONDS.update(dict.fromkeys(sys.argv[1:], 0.2))
intake._pack_modes = lambda bench, mps, notes: ("mps",)  # as on a machine with GPUs
CpuSlices.open_daemon = lambda backend: MpsDaemon()
quick = ["-w", "synthetic", "--set", "base_ms=2", "--set", "per_sample_ms=0.02", "--global-batch", "32"]
sys.exit(run(["compare", "-d", "cpu/2", *quick, "--layouts", "solo,pack", "--budget", "10s", "--json"]))
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


def gone(process: psutil.Process, folder: str, seconds: float = 60.0) -> bool:
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
    holder.wait(60)
    holder.stdout.close()
    assert gone(server, folder)


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.35, 0.5, 0.8])
def test_nothing_is_left_whenever_the_holder_is_killed(install: Install, tmp_path: Path, seconds: float) -> None:
    """Also while the guard, the program or the daemon is only just starting: no process, no folder."""
    install()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=own_folder(tmp_path)
    )
    time.sleep(seconds)
    holder.kill()
    holder.wait(60)
    assert nothing_left(tmp_path)


def test_a_daemon_of_somebody_elses_is_not_touched(install: Install, tmp_path: Path) -> None:
    """It has the program's name and a folder of its own, which the environment names, as its user's shell would."""
    install()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    named = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(theirs)}
    subprocess.run([PROGRAM, "-d"], env=named, check=True)
    server = server_of(str(theirs))
    try:
        command = [sys.executable, "-c", HOLDER.replace("time.sleep(600)", "daemon.close()")]
        told = subprocess.run(command, env=own_folder(tmp_path) | named, capture_output=True, text=True, timeout=30)
        assert told.stdout.strip() != str(theirs)
        assert server.is_running()
        assert server.status() != psutil.STATUS_ZOMBIE
        assert (theirs / "pid").exists()
    finally:
        server.kill()


@two_cores
@pytest.mark.slow
@pytest.mark.parametrize("end", ["success", "failure", "SIGINT", "SIGTERM"])
def test_a_comparison_leaves_no_daemon_however_it_ends(install: Install, tmp_path: Path, end: str) -> None:
    """Real children are packed under the played daemon, on CPU slices; failure: the daemon does not come up."""
    install(fails=end == "failure")
    quick = ["solo"] if end.startswith("SIG") else ["solo", "pack", "race", "knobs"]  # a signal must not come too late
    process = subprocess.Popen(
        [sys.executable, "-c", COMPARISON, *quick],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own_folder(tmp_path) | {"XDG_STATE_HOME": str(tmp_path / "state")},
    )
    if end.startswith("SIG"):
        until = time.monotonic() + 60
        while not list(tmp_path.glob("evener-mps-*/pid")) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(getattr(signal, end))
    out, err = process.communicate(timeout=90)
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}.get(end, 0), err
    answer = json.loads(out)
    if end == "success":
        assert any(layout["name"].endswith("under MPS") for layout in answer["layouts"])
    if end == "failure":
        assert "no GPU here" in out
    assert nothing_left(tmp_path)


def own_folder(tmp_path: Path) -> dict[str, str]:
    """The environment with the test's folder for temporary files, where daemons of ours have theirs."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


def nothing_left(tmp_path: Path, seconds: float = 60.0) -> bool:
    """Whether within a time no process of the program's family has a folder in the test's, and no such folder stays."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not list(tmp_path.glob("evener-mps-*")) and not family(tmp_path):
            return True
        time.sleep(0.1)
    return False


def family(tmp_path: Path) -> list[int]:
    """Daemons, servers and guards that live and were given a folder in the test's."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words, variables = " ".join(process.cmdline()), process.environ()
            of_ours = "nvidia-cuda-mps" in words or "evener.devices.nvidia.mps" in words
            own = variables.get("TMPDIR") == str(tmp_path)
            if of_ours and own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


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
