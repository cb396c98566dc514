"""Fork servers for probes that tests share: one per framework, for all sessions of this process.

Each is forked from the RankServer of its framework, which all test workers share, since importing
PyTorch takes 1.5 s of CPU time and TensorFlow 3 s. A session still ends its probes itself; they are
forked in its folder and with the variables that its own server would have had, so that a test's own
folders are used.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import msgspec

from evener.balancer.probes import fork_server, hosts
from evener.balancer.probes.fork_server import ForkedChild, ServerProcess, _merge_variables
from evener.devices.backend import ChildEnvironment
from tests.support.rank_server import RankServer

RANK_SERVERS = {"torch_backend": "tests.support.torch_imports", "keras_backend": "keras"}
ACCEPT_SECONDS = 120.0  # for the import of a framework on a busy machine
shared: set[int] = set()  # the process ids of servers that tests share


class ForkedProgram:
    """The fork server's program as a fork of a RankServer's process, with the methods of Popen.

    It has those that a ServerProcess uses.
    """

    def __init__(
        self, server: RankServer, folder: Path, descriptors: Sequence[int], start: dict[str, Any]
    ) -> None:
        words = "tests.support.shared_servers.serve", folder, str(folder / "door"), start
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(folder / "door"))
            door.listen()
            door.settimeout(ACCEPT_SECONDS)
            Thread(target=self._run, args=(server, *words), daemon=True).start()
            with door.accept()[0] as line:
                socket.send_fds(line, [b"."], descriptors)
                self.pid = int(line.recv(32))
        self._handle = os.pidfd_open(self.pid)

    @staticmethod
    def _run(server: RankServer, *words: Any) -> None:
        with suppress(AssertionError):  # the server was killed
            server.run(*words, ranks=[{}])

    def poll(self) -> int | None:
        """Return None while it is running."""
        return -signal.SIGKILL if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, or raise TimeoutExpired."""
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
        return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        """Send it a signal if it is still running."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill it if it is still running."""
        self.send_signal(signal.SIGKILL)


def serve(_folder: Path, _rank: int, door: str, start: dict[str, Any]) -> None:
    """Run `python -m evener.balancer.probes.worker` in this process.

    Its socket and log file arrive through the socket at `door`.
    """
    from evener.balancer.probes import worker

    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(door)
        _, (channel, log), _, _ = socket.recv_fds(line, 1, 2)
        line.send(str(os.getpid()).encode())
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    # if it can't fork, it starts a new program that inherits the socket
    os.set_inheritable(channel, True)
    os.environ.clear()
    os.environ.update(start["variables"])
    sys.argv = [worker.__file__, str(channel), *start["imports"]]
    sys.orig_argv = [sys.executable, "-P", "-m", fork_server.MODULE, *sys.argv[1:]]
    worker.main()


class SharedServer(ServerProcess):
    """A server that many sessions use, and that only `end` stops."""

    end = ServerProcess.close

    def close(self) -> None:
        """Do nothing, as other sessions use it."""

    def start(
        self, child: ForkedChild, environment: ChildEnvironment, streams: Sequence[int]
    ) -> int:
        """Fork a probe process with the current test's variables.

        The server itself was started with those of another test.
        """
        variables = _merge_variables(environment.variables)
        return super().start(
            child, msgspec.structs.replace(environment, variables=variables), streams
        )


@contextmanager
def running_servers(
    rank_server: Callable[[str], RankServer], folder: Path
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Return a context in which the sessions of this process share servers.

    The servers stop when the outer context ends.
    """
    servers: dict[tuple[frozenset[tuple[str, str]], tuple[str, ...]], SharedServer] = {}
    run = fork_server._run

    def fork(channel: int, log: int, variables: Mapping[str, str], imports: Sequence[str]) -> Any:
        for backend, module in RANK_SERVERS.items():
            if backend in imports[0]:
                start = {"variables": _merge_variables(variables), "imports": imports}
                return ForkedProgram(
                    rank_server(module), folder / str(len(servers)), (channel, log), start
                )
        return run(channel, log, variables, imports)

    def make(variables: Mapping[str, str], imports: Sequence[str]) -> SharedServer:
        with mock.patch.object(fork_server, "_run", fork):
            return SharedServer(variables, imports)

    def find(variables: Mapping[str, str], imports: Sequence[str]) -> SharedServer:
        key = frozenset(variables.items()), tuple(imports)
        if key not in servers or not servers[key].alive:
            servers[key] = starter.submit(make, variables, imports).result()
            shared.add(servers[key].pid)
        return servers[key]

    @contextmanager
    def sharing() -> Iterator[None]:
        with mock.patch.object(hosts, "ServerProcess", find):
            yield

    # the kernel kills a server when the thread that started it ends
    with ThreadPoolExecutor(1) as starter:
        try:
            yield sharing
        finally:
            for server in servers.values():
                server.end()
