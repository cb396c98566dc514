"""Finds the processes that run probes.

They are grandchildren of the tests' process: a server process forks them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from evener.balancer.probes.fork_server import MODULE
from tests.support.python_path import python_path
from tests.support.shared_servers import shared

AT_BIRTH = """
import os, sys
real = os.dup
def dup(descriptor):  # what a child calls first, for streams that are its own
    os.dup = real
    exec({code!r})
    return real(descriptor)
if {module!r} in sys.orig_argv:
    os.dup = dup
"""


def list_children() -> list[psutil.Process]:
    """Return the children of this process, except the servers that all tests share."""
    return [child for child in psutil.Process().children() if child.pid not in shared]


def list_probe_children(pid: int | None = None) -> list[psutil.Process]:
    """Return the running probe processes of this process or of another one.

    For this process that includes those of the servers that all tests share.
    """
    found: list[psutil.Process] = []
    forked = [psutil.Process(each) for each in shared if pid is None and psutil.pid_exists(each)]
    for server in {each.pid: each for each in (*psutil.Process(pid).children(), *forked)}.values():
        with suppress(psutil.Error):
            if server.pid in shared or MODULE in server.cmdline():
                found += [
                    child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE
                ]
    return found


def still_runs(process: psutil.Process) -> bool:
    """Return False for a process that has ended.

    That includes zombies: process 1 of many containers doesn't wait for its children.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def at_birth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Run `code` in every probe process before it writes anything."""
    (tmp_path / "sitecustomize.py").write_text(AT_BIRTH.format(code=code, module=MODULE))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
