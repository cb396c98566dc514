"""Servers that outlive their sessions: those of this process that import the same framework share one.

PyTorch takes 1.5 s of CPU to import, TensorFlow 3 s. A session ends its children as ever; they are forked in its folder
and with the variables that its server would have had, so that a test's own folders count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import msgspec

from evener.balancer.probes import hosts
from evener.balancer.probes.fork_server import ForkedChild, ServerProcess, _merge_variables
from evener.devices.backend import ChildEnvironment

shared: set[int] = set()  # the processes of servers that tests share


class SharedServer(ServerProcess):
    """A server that many sessions use, and `end` alone ends."""

    end = ServerProcess.close

    def close(self) -> None:
        """Leave it to the others."""

    def start(self, child: ForkedChild, environment: ChildEnvironment, streams: Sequence[int]) -> int:
        """Fork a child with this test's variables, not those of the test that the server was started for."""
        variables = _merge_variables(environment.variables)
        return super().start(child, msgspec.structs.replace(environment, variables=variables), streams)


@contextmanager
def running_servers() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A context in which the sessions of this process share servers; the servers end with the outer one."""
    servers: dict[tuple[frozenset[tuple[str, str]], tuple[str, ...]], SharedServer] = {}

    def find(variables: Mapping[str, str], imports: Sequence[str]) -> SharedServer:
        key = frozenset(variables.items()), tuple(imports)
        if key not in servers or not servers[key].alive:
            servers[key] = starter.submit(SharedServer, variables, imports).result()
            shared.add(servers[key].pid)
        return servers[key]

    @contextmanager
    def sharing() -> Iterator[None]:
        with mock.patch.object(hosts, "ServerProcess", find):
            yield

    with ThreadPoolExecutor(1) as starter:  # the kernel ends a server with the thread that started it
        try:
            yield sharing
        finally:
            for server in servers.values():
                server.end()
