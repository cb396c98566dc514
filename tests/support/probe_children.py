"""The children of probes that run below a process: each is forked by a server, which is no probe's
child itself.
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
    """The children of this process, without the servers that tests share."""
    return [child for child in psutil.Process().children() if child.pid not in shared]


def list_probe_children(pid: int | None = None) -> list[psutil.Process]:
    """Those of this process and of the servers that tests share, or of another process, that
    haven't ended.
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
    """False for one that has ended, also where nobody waits for it, as process 1 of many containers
    doesn't.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def at_birth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Run `code` in every child before its first word."""
    (tmp_path / "sitecustomize.py").write_text(AT_BIRTH.format(code=code, module=MODULE))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
