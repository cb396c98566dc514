"""One interface for all hosts of a session's devices.

The hosts are this machine, and others that are reached through Ray.

A `RemoteHost` calls a `HostService`, which runs in evener's actor on a host of the cluster. A
thread receives the messages of the children on that host, and delivers them like messages of local
children.
"""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from typing import Any

import msgspec

from evener.devices.backend import ChildEnvironment, Vitals
from evener.devices.cluster.agents import ActorLostError, HostLostError, find_agent
from evener.devices.cpu import available_memory_bytes
from evener.devices.network import choose_interface
from evener.devices.registry import all_backends, child_environment
from evener.devices.types import Device, group_by_host
from evener.system.memory_files import make_memory_file
from evener.workloads.registry import find_imports

from .children import Child, Inbox, RunningChild
from .failures import StoppedError
from .fork_server import BuiltServer, ChildServer, ServerProcess
from .interference import InterferenceMonitor, Neighbours
from .launch_plan import LOOPBACK, reserve_free_ports
from .protocol import Build, ChildError, Command, Exited, HostLost, Message, Stack
from .script_copy import ScriptCopy, WrittenScript, copy_workload

RECEIVE_SECONDS = 2.0  # seconds after which a call without a message returns
INBOX = 10_000  # messages: more than the ranks of 1024 devices send while none is read
SILENT_SECONDS = 15.0  # seconds of silence after which a host counts as lost;
ANSWER_SECONDS = 3.0  # the same timeout once a rank on any host has failed


class LocalHost:
    """The host of this process: its children, drivers and free ports.

    `name` is its name in a cluster; "" outside of one. `devices` are all devices of the request.
    Devices of other hosts are ignored.
    """

    find_ports = staticmethod(reserve_free_ports)
    make_file = staticmethod(make_memory_file)
    available_memory_bytes = staticmethod(available_memory_bytes)

    def __init__(
        self, devices: Sequence[Device], framework: str, workload: str, name: str = ""
    ) -> None:
        self._framework = framework
        self._imports = find_imports(workload, framework)
        self._network = choose_interface(name, [device.host for device in devices])
        self.monitor = InterferenceMonitor(devices, name)
        self._running: set[Child] = set()
        self._shares_build = framework == "torch" and ":" in workload
        self._servers: dict[frozenset[tuple[str, str]], ServerProcess] = {}
        # copies of children that have built the user's workload, by the same keys
        self._built: dict[frozenset[tuple[str, str]], BuiltServer] = {}
        self._closed = threading.Event()
        # the kernel ends a server with the *thread* that started it, so all are started by one
        # thread that lasts
        self._starter = ThreadPoolExecutor(1, "child starter")

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of this host by its name, and return the result.

        The name may contain an attribute, as in "monitor.read". `RemoteHost.ask` has the same
        interface.
        """
        return attrgetter(method)(self)(*arguments)

    def wait_for_drivers(
        self, positions: Collection[int], stop: threading.Event | None = None
    ) -> None:
        """Wait until the driver of each device at `positions` answers.

        Raises GroupError, which names a device that is gone or doesn't answer, and StoppedError if
        `stop` is set.
        """
        self.monitor.wait_for_drivers(positions, stop or threading.Event())

    def make_environment(self, devices: Sequence[Device]) -> ChildEnvironment:
        """Return the environment variables and CPU cores for a child on these devices.

        Raises DeviceError if the devices can't be used.
        """
        environment = child_environment(devices, self._framework)
        return msgspec.structs.replace(
            environment, variables={**environment.variables, **self._network}
        )

    def start_child(
        self, rank: int, inbox: Inbox, environment: ChildEnvironment, cap_bytes: int | None
    ) -> Child:
        """Start a child, and clean up after children that have exited.

        `rank` and `inbox` are the child's rank in its group and the group's inbox. `cap_bytes`
        limits the child's memory, if given. Raises OSError or RuntimeError if the child can't be
        started.
        """

        def start() -> Child:
            if self._closed.is_set():
                raise RuntimeError("this session has ended")
            server, far_end = self._find_server(environment)
            child = Child(rank, inbox, server, environment, cap_bytes, far_end)
            ended = {other for other in self._running if not other.alive}
            for other in ended:  # perhaps while it was idle, so that nobody has noticed yet
                other.end()
            self._running = {child, *self._running - ended}
            return child

        return self._starter.submit(start).result()

    def _find_server(self, environment: ChildEnvironment) -> tuple[ChildServer, int | None]:
        """Return a server that can fork a child with this environment."""
        # a server has already imported the framework, so it suits only children with the same
        # values of all variables that affect the import
        late = tuple(prefix for backend in all_backends() for prefix in backend.late_variables)
        before = {
            name: text for name, text in environment.variables.items() if not name.startswith(late)
        }
        key = frozenset(before.items())
        built = self._built.get(key)
        if built is not None and built.alive:
            # a child has built the user's workload, and its copy has it in memory
            return built, None
        if key not in self._servers or not self._servers[key].alive:
            self._servers[key] = ServerProcess(before, self._imports)
        if built is not None or not self._shares_build:
            return self._servers[key], None
        built = self._built[key] = BuiltServer()
        # the child leaves a copy of itself, which forks later children as this channel requests
        return self._servers[key], built.far_end

    def _end_children(self) -> None:
        for child in self._running:
            child.end()
        for server in (*self._built.values(), *self._servers.values()):
            server.close()

    def measure_short(self, positions: Iterable[int], clean: Collection[int]) -> dict[int, int]:
        """Return how many bytes of each device's memory other processes hold, by position.

        No child runs on the `clean` positions. Positions where the number is unknown are left out.
        """
        own = {child.pid for child in self._running if child.alive}
        return self.monitor.measure_short(positions, own, clean)

    def find_neighbours(self, positions: Iterable[int]) -> dict[int, Neighbours]:
        """Return the other processes that computed on each device, by position.

        Only computation since the last call counts. The session's children don't count. A position
        is left out if the driver lists no child on it.
        """
        own = {child.pid for child in self._running if child.alive}
        return self.monitor.find_neighbours(positions, own)

    def close(self) -> None:
        """Kill every child immediately. May be called more than once."""
        self._closed.set()
        with suppress(RuntimeError):  # it is already closed
            self._starter.submit(self._end_children).result()  # after a child that is being started
        self._starter.shutdown()
        self.monitor.close()


class HostService(LocalHost):
    """A `LocalHost` that evener's actor on another machine serves to this session.

    Each call runs in its own thread. The calling `RemoteHost` chooses an integer key for each
    child. `script` is a copy of the user's files; None for a built-in workload.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        framework: str,
        workload: str,
        name: str,
        script: ScriptCopy | None,
    ) -> None:
        self._script = WrittenScript(script) if script else None
        function = workload.rpartition(":")[2]
        self._workload = f"{self._script.path}:{function}" if self._script else workload
        super().__init__(devices, framework, self._workload, name)
        self._inbox: Inbox = queue.Queue(INBOX)
        self._children: dict[int, Child] = {}

    def begin_child(self, key: int, environment: ChildEnvironment, cap_bytes: int | None) -> None:
        """Start a child under this key, with its memory limited to `cap_bytes` if given."""
        self._children[key] = self.start_child(key, self._inbox, environment, cap_bytes)

    def send(self, key: int, command: Command) -> None:
        """Send a command to the child with this key.

        The workload of a `Build` command is replaced by the script's copy on this host.
        """
        if isinstance(command, Build):
            command = msgspec.structs.replace(command, workload=self._workload)
        self._children[key].send(command)

    def receive(self) -> list[tuple[int, Message]]:
        """Return the messages of children since the last call, with the children's keys.

        Wait up to `RECEIVE_SECONDS` for the first message; return an empty list if none arrives.
        """
        messages: list[tuple[int, Message]] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=RECEIVE_SECONDS))
            while True:
                messages.append(self._inbox.get_nowait())
        return [(key, self._name_origin(message)) for key, message in messages]

    def find_stack(self, key: int) -> Stack | None:
        """Return the current stack of the child with this key; None if it doesn't answer."""
        return self._children[key].find_stack()

    def end(self, key: int) -> None:
        """Kill the child with this key."""
        self._children.pop(key).end()

    def close(self) -> None:
        """Kill every child, and delete the copy of the script."""
        super().close()
        if self._script:
            self._script.close()

    def _name_origin(self, message: Message) -> Message:
        script = self._script
        if script is None or not isinstance(message, ChildError):
            return message
        texts = {
            name: script.name_origin(getattr(message, name))
            for name in ("text", "where", "traceback")
        }
        return msgspec.structs.replace(message, **texts)


class RemoteChild(RunningChild):
    """A child that runs on another host. `key` identifies it on that host."""

    def __init__(self, host: RemoteHost, key: int, rank: int, inbox: Inbox) -> None:
        self.rank = rank
        self._inbox = inbox
        self.alive = True  # according to its last message
        self._host = host
        self._key = key
        self.generation = host.service.generation  # generation of the actor that it runs in

    def send(self, command: Command) -> None:
        """Send a command to the child, without waiting for the reply.

        The inbox gets the reply, or a message that the child has exited.
        """
        self._host.service.begin("send", self._key, command)

    def find_stack(self) -> Stack | None:
        """Return the current stack of the child's main thread; None if it doesn't answer."""
        with suppress(HostLostError):
            stack: Stack | None = self._host.ask("find_stack", self._key)
            return stack
        return None

    def find_loss(self) -> str:
        """Return the reason why the child's host doesn't answer; "" if it does."""
        try:
            self._host.ask("available_memory_bytes", seconds=ANSWER_SECONDS)
        except HostLostError as lost:
            return lost.message
        return ""

    def end(self) -> None:
        """Kill the child, unless its host was lost."""
        self._host.forget(self._key)

    def receive(self, message: Message) -> None:
        """Put a message from the child into the group's inbox.

        The message may also say that the child has exited or that its host was lost.
        """
        self.alive = not isinstance(message, Exited | HostLost)
        self._inbox.put((self.rank, message))


class RemoteHost:
    """One remote host of the cluster.

    Its methods raise HostLostError if evener's actor on the host doesn't answer. `script` is the
    copy of the user's files to write on the host; None for a built-in workload.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        framework: str,
        workload: str,
        name: str,
        script: ScriptCopy | None,
    ) -> None:
        self._name = name
        self.service = find_agent(name).keep(
            HostService, tuple(devices), framework, workload, name, script
        )
        self._keys = itertools.count()
        self._children: dict[int, RemoteChild] = {}
        self._lost: HostLostError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._receive, name=f"children on {name}", daemon=True).start()

    def ask(self, method: str, *arguments: Any, **how: Any) -> Any:
        """Call a method of the host's `HostService`, and return the result.

        `how` are the options of `RemoteObject.ask`, such as a timeout. If evener's actor on the
        host has exited, start a new actor there and repeat the call.
        """
        if self._lost is not None:
            raise self._lost
        generation = self.service.generation
        try:
            return self.service.ask(method, *arguments, **how)
        except ActorLostError:
            if not self._recover(generation):
                raise
        return self.service.ask(method, *arguments, **how)

    def _recover(self, generation: int) -> bool:
        """Start a new actor after the old one exited; False if impossible."""
        if self._closed.is_set() or not self.service.restart(generation):
            return False
        for key, child in tuple(self._children.items()):
            if child.generation <= generation and self._children.pop(key, None) is not None:
                # the children of the old actor count as killed
                child.receive(Exited(-signal.SIGKILL, output="evener's actor on the host ended"))
        return True

    def start_child(
        self, rank: int, inbox: Inbox, environment: ChildEnvironment, cap_bytes: int | None
    ) -> RemoteChild:
        """Start a child on the host, with the parameters of `LocalHost.start_child`."""
        key = next(self._keys)
        self._children[key] = child = RemoteChild(self, key, rank, inbox)
        try:
            self.service.ask("begin_child", key, environment, cap_bytes)
        except ActorLostError:
            if not self._recover(child.generation):  # otherwise the child is reported as killed
                raise
        return child

    def forget(self, key: int) -> None:
        """Kill the child with this key, unless its host was closed or lost."""
        if self._children.pop(key, None) is not None and not self._closed.is_set():
            with suppress(HostLostError):
                self.ask("end", key)

    def wait_for_drivers(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait until the driver of each GPU of the host answers.

        Raises GroupError, which names a device that is gone or doesn't answer, and StoppedError if
        `stop` is set.
        """
        self.ask("wait_for_drivers", tuple(positions), stop=stop)
        if stop.is_set():
            raise StoppedError

    def close(self) -> None:
        """Kill every child on the host. May be called more than once."""
        if not self._closed.is_set():
            self._closed.set()
            self.service.close()

    def _receive(self) -> None:
        while not self._closed.is_set():
            generation = self.service.generation
            try:
                messages = self.service.ask("receive", seconds=SILENT_SECONDS)
            except Exception as error:
                if isinstance(error, ActorLostError) and self._recover(generation):
                    continue
                self._mark_lost(error)
                return
            for key, message in messages:
                child = self._children.get(key)
                if child is not None:
                    child.receive(message)

    def _mark_lost(self, error: Exception) -> None:
        """Record that the host is lost, and notify its children's groups."""
        if not isinstance(error, HostLostError):
            error = HostLostError(self._name, f"failed: {error}")
        self._lost = error
        for child in tuple(self._children.values()):
            child.receive(HostLost(self._lost.message))


class Hosts:
    """All hosts of a session's devices, behind a single interface.

    Raises DeviceError if a host can't be reached.
    """

    def __init__(self, devices: Sequence[Device], framework: str, workload: str) -> None:
        self._devices = devices
        self._framework = framework
        self._by_name: dict[str, LocalHost | RemoteHost] = {}
        for name in group_by_host(devices):
            self._by_name[name] = (
                RemoteHost(devices, framework, workload, name, copy_workload(workload))
                if name
                else LocalHost(devices, framework, workload)
            )

    def find(self, device: Device) -> LocalHost | RemoteHost:
        """Return the host of a device."""
        return self._by_name[device.host]

    def find_addresses(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return the address at which each rank meets the others of its group.

        `devices` has one device per rank. An address is on the host of the device, or on loopback
        if there is only one host. Its port is free now. For PyTorch's ranks on one host, it is the
        path of a file instead.
        """
        places = Counter(device.host for device in devices)
        if len(places) == 1 and self._framework == "torch":
            # with an address, any user of the machine could connect to the rendezvous store and
            # write to it
            path: str = self._by_name[devices[0].host].ask("make_file")
            return (path,) * len(devices)
        free = {}
        for host, count in places.items():
            address = host if len(places) > 1 else LOOPBACK
            free[host] = iter(
                [
                    f"{address}:{port}"
                    for port in self._by_name[host].ask("find_ports", count, address)
                ]
            )
        return tuple(next(free[device.host]) for device in devices)

    def wait_for_drivers(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait until the driver of each device at `positions` answers.

        Raises GroupError, which names a device that is gone or doesn't answer, and StoppedError if
        `stop` is set.
        """
        for host in self._with_drivers(positions):
            host.wait_for_drivers(positions, stop)

    def read(self, positions: Collection[int]) -> Mapping[int, Vitals]:
        """Return the latest vitals (clocks, power, memory) of the GPUs at these positions.

        Raises GroupError if a device is gone, or if its driver has been silent for too long.
        """
        found: dict[int, Vitals] = {}
        for host in self._with_drivers(positions):
            found |= host.ask("monitor.read", tuple(positions))
        return found

    def measure_short(self, positions: Collection[int], clean: Collection[int]) -> dict[int, int]:
        """Return how many bytes of each device's memory other processes hold, by position.

        No child runs on the `clean` positions. Positions where the number is unknown are left out.
        """
        found: dict[int, int] = {}
        for host in self._among(positions):
            found |= host.ask("measure_short", tuple(positions), set(clean))
        return found

    def find_neighbours(self, positions: Collection[int]) -> Mapping[int, Neighbours]:
        """Return the other processes that computed on each device, by position.

        Only computation since the last call counts. The session's children don't count. A position
        is left out if the driver lists no child on it.
        """
        found: dict[int, Neighbours] = {}
        for host in self._with_drivers(positions):
            found |= host.ask("find_neighbours", tuple(positions))
        return found

    def available_memory_bytes(self) -> int:
        """Return the least available memory of any host, in bytes.

        Lost hosts don't count. Return 0 if all hosts are lost.
        """
        sizes: list[int] = []
        for host in self._by_name.values():
            with suppress(HostLostError):
                sizes.append(host.ask("available_memory_bytes"))
        return min(sizes, default=0)

    def close(self) -> None:
        """Kill every child. May be called more than once."""
        for host in self._by_name.values():
            host.close()

    def _among(self, positions: Collection[int]) -> Iterator[LocalHost | RemoteHost]:
        for name in dict.fromkeys(self._devices[position].host for position in positions):
            yield self._by_name[name]

    def _with_drivers(self, positions: Collection[int]) -> Iterator[LocalHost | RemoteHost]:
        """Yield the hosts of the GPUs at these positions."""
        return self._among(
            [position for position in positions if not self._devices[position].on_cpu]
        )
