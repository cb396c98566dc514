"""The children and devices of one machine: starts the ones, watches the others.

A session has one for each host of its devices; `hosts` reaches those that are elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from evener.devices.backend import ChildEnvironment, Vitals
from evener.devices.cpu import available_memory_bytes
from evener.devices.network import choose_interface
from evener.devices.registry import all_backends, child_environment
from evener.devices.types import Device
from evener.workloads.registry import find_imports

from .children import Child, Inbox
from .fork_server import ServerProcess
from .interference import InterferenceMonitor
from .launch_plan import LOOPBACK, find_free_ports


class LocalHost:
    """This machine, which is `name` in a cluster: its children, drivers and free ports."""

    def __init__(self, devices: Sequence[Device], framework: str, workload: str, name: str = "") -> None:
        self._framework = framework
        self._imports = find_imports(workload, framework)
        self._network = choose_interface(name, [device.host for device in devices])
        self.monitor = InterferenceMonitor(devices, name)
        self._children: set[Child] = set()
        self._servers: dict[frozenset[tuple[str, str]], ServerProcess] = {}
        self._closed = threading.Event()
        # the kernel ends a server with the *thread* that started it, so all are started by one thread that lasts
        self._starter = ThreadPoolExecutor(1, "child starter")

    def make_environment(self, devices: Sequence[Device]) -> ChildEnvironment:
        """A child's start on these devices; DeviceError if they can't have it."""
        environment = child_environment(devices, self._framework)
        return msgspec.structs.replace(environment, variables={**environment.variables, **self._network})

    def start_child(self, rank: int, inbox: Inbox, environment: ChildEnvironment, cap_bytes: int | None) -> Child:
        """A new child; OSError or RuntimeError if none can be started."""

        def start() -> Child:
            if self._closed.is_set():
                raise RuntimeError("this session has ended")
            process = self._find_server(environment).start(environment.variables)
            child = Child(rank, inbox, process, environment.cores, cap_bytes)
            ended = {other for other in self._children if not other.alive}
            for other in ended:  # perhaps while it rested, and nobody has missed it yet
                other.end()
            self._children = {child, *self._children - ended}
            return child

        return self._starter.submit(start).result()

    def _find_server(self, environment: ChildEnvironment) -> ServerProcess:
        """The server that forks children whose variables that matter during the framework's import are equal."""
        late = tuple(prefix for backend in all_backends() for prefix in backend.late_variables)
        before = {name: text for name, text in environment.variables.items() if not name.startswith(late)}
        key = frozenset(before.items())
        if key not in self._servers or not self._servers[key].alive:
            self._servers[key] = ServerProcess(before, self._imports)
        return self._servers[key]

    def _end_children(self) -> None:
        for child in self._children:
            child.end()
        for server in self._servers.values():
            server.close()

    def find_addresses(self, count: int, address: str = LOOPBACK) -> tuple[str, ...]:
        """`count` addresses with ports that are free on this machine at this moment."""
        return tuple(f"{address}:{port}" for port in find_free_ports(count, address))

    def wait_for_drivers(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait for each driver's answer; GroupError names a device that has none or is gone."""
        self.monitor.wait_for_drivers(positions, stop)

    def read(self, positions: Iterable[int]) -> Mapping[int, Vitals]:
        """The drivers' present readings, by position; GroupError if a device is gone or its driver silent for long."""
        return self.monitor.read(positions)

    def measure_short(self, positions: Iterable[int], clean: Collection[int]) -> dict[int, int]:
        """Bytes that each device lacks because others hold them; no child runs on the `clean` ones."""
        own = {child.pid for child in self._children if child.alive}
        return self.monitor.measure_short(positions, own, clean)

    def available_memory_bytes(self) -> int:
        """Memory that can still be had."""
        return available_memory_bytes()

    def close(self) -> None:
        """Kill every child at once; safe to call twice."""
        self._closed.set()
        with suppress(RuntimeError):  # closed before
            self._starter.submit(self._end_children).result()  # after one that starts just now
        self._starter.shutdown()
        self.monitor.close()
