"""Fixtures for every room."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.fake_nvml import FakeNvml


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard() -> None:
    """Tests that are run under nohup, or behind an `&`, send them all the same: processes inherit what is ignored."""
    for number, heard in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, heard)


@pytest.fixture(autouse=True, scope="session")
def terminals_have_their_own_size() -> None:
    """A size that whoever started the tests has exported would count for every terminal that a test opens."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


@pytest.fixture
def cores_of_one_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """For tests that measure on the machine's cores, side by side where there are several workers.

    The open file is locked by all of them, so whoever locks it alone (LOCK_EX) may play another user on these cores.
    """
    own = tmp_path_factory.getbasetemp()
    run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    descriptor = os.open(run / "cores", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Small tensors are fastest on one thread, as each rank has; a place sets the threads of the whole process."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`fake_nvml(gpus=2, driver=True)` puts a scripted double in the place of pynvml and returns it."""

    def install(gpus: int = 2, driver: bool = True) -> Any:
        double = FakeNvml(gpus, driver)
        monkeypatch.setitem(sys.modules, "pynvml", double)
        return double

    return install
