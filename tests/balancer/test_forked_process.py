"""The process from which children are forked.

What it can't import or survive is left to each child.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.balancer.probes.children import Child, Inbox
from evener.balancer.probes.fork_server import ServerProcess
from evener.balancer.probes.protocol import STACK_SIGNAL, Exited, Ready
from evener.devices.backend import ChildEnvironment
from tests.support.fake_cuda import make_cuda_library
from tests.support.python_path import python_path

SECONDS = 60.0
LOADS_CUDA = """
import ctypes
open({folder!r} + "/imported", "a").write("x")
ctypes.CDLL({library!r})
"""
STARTED, NOT_STARTED = 0, 3  # by cuda.h


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    made: list[ServerProcess] = []
    yield made
    for server in made:
        server.close()


def is_ready(server: ServerProcess) -> bool:
    """Return whether a child of the server starts."""
    inbox: Inbox = queue.Queue()
    child = Child(0, inbox, server, ChildEnvironment({}), None)
    try:
        return isinstance(inbox.get(timeout=SECONDS)[1], Ready)
    finally:
        child.end()


@pytest.mark.parametrize("status", [STARTED, NOT_STARTED])
def test_what_starts_cuda_is_not_imported_before_the_fork(
    servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    """It was imported once; if it started CUDA, the program then restarted without it."""
    library = make_cuda_library(tmp_path, status)
    (tmp_path / "loads_cuda.py").write_text(
        LOADS_CUDA.format(folder=str(tmp_path), library=str(library))
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    servers.append(server := ServerProcess({}, ("loads_cuda",)))
    assert is_ready(server)
    assert is_ready(server)
    assert (tmp_path / "imported").read_text() == "x"
    loaded = Path(f"/proc/{server.pid}/maps").read_text()
    assert (str(library) in loaded) is (status == NOT_STARTED)


OPENS_FILES = """
import os, sys
from types import SimpleNamespace
from evener.balancer.probes import forkable
open({folder!r} + "/imported", "a").write("x")
for backend in forkable.all_backends():
    if backend.driver_files:
        backend.driver_files = ({folder!r} + "/nvidia",)
held = os.open({folder!r} + "/nvidiactl", os.O_CREAT)
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: {answer}))
"""


@pytest.mark.parametrize(("answer", "kept"), [("False", True), ("1 / 0", False)])
def test_files_of_the_driver_are_kept_if_a_copy_can_start_it(
    servers: list[ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answer: str,
    kept: bool,
) -> None:
    """NVML opens them; the program restarts without its imports if a trial fails."""
    text = OPENS_FILES.format(folder=str(tmp_path), answer=answer)
    (tmp_path / "opens_files.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    servers.append(server := ServerProcess({}, ("opens_files",)))
    assert is_ready(server)
    assert (tmp_path / "imported").read_text() == "x"
    held = [path.readlink().name for path in Path(f"/proc/{server.pid}/fd").iterdir()]
    assert ("nvidiactl" in held) is kept


@pytest.mark.parametrize("name", ["no_such_module", "synthetic_workload:no_such_name"])
def test_what_can_t_be_imported_is_left_to_the_children(
    servers: list[ServerProcess], name: str
) -> None:
    servers.append(server := ServerProcess({}, (name,)))
    assert is_ready(server)


def test_a_server_outlives_a_signal_that_comes_before_it_can_answer(
    servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stop right after the start sends such a signal, because Python takes a moment to begin."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(0.5)")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    servers.append(server := ServerProcess({}, ()))
    server.send_signal(None, STACK_SIGNAL)
    assert is_ready(server)


def test_a_child_runs_in_the_folder_that_its_session_is_in(
    servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A workload is named by a path relative to it. The server may have been started elsewhere."""
    servers.append(server := ServerProcess({}, ()))
    monkeypatch.chdir(tmp_path)
    inbox: Inbox = queue.Queue()
    child = Child(0, inbox, server, ChildEnvironment({}), None)
    assert isinstance(inbox.get(timeout=SECONDS)[1], Ready)
    end = time.monotonic() + SECONDS
    while not child.pid:  # the server's answer takes another route than the child's
        assert time.monotonic() < end
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}/cwd").readlink() == tmp_path
    child.end()


def test_a_server_that_has_ended_starts_nothing_and_leaves_no_pipe_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child ends like the server, with its output: the server may have died just before the
    request.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import os; os.write(2, b'no such instruction'); os.kill(os.getpid(), 4)"
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    server = ServerProcess({}, ())
    while server.alive:
        time.sleep(0.01)
    before = set(os.listdir("/proc/self/fd"))
    inbox: Inbox = queue.Queue()
    child = Child(0, inbox, server, ChildEnvironment({}), None)
    assert inbox.get(timeout=SECONDS) == (0, Exited(-4, output="no such instruction"))
    child.end()
    del child
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_request_that_is_too_long_is_an_error_of_its_own(servers: list[ServerProcess]) -> None:
    servers.append(server := ServerProcess({}, ()))
    with pytest.raises(OSError, match="too long"):
        Child(0, queue.Queue(), server, ChildEnvironment({"LONG": "x" * (64 << 20)}), None)
    assert is_ready(server)
