"""Start probe processes and watch devices, on this host and on others through Ray."""

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
    """Starts probe processes and reads device drivers on the host where it is created.

    `name` is the host's name in a cluster, or "" on the machine where the search runs.
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
        """Call the method with this name, and return its result.

        `RemoteHost.ask` does the same on another host.
        """
        return attrgetter(method)(self)(*arguments)

    def wait_for_drivers(
        self, positions: Collection[int], stop: threading.Event | None = None
    ) -> None:
        """Wait until the drivers of these devices answer.

        Raises GroupError if a driver is lost, and StoppedError once `stop` is set.
        """
        self.monitor.wait_for_drivers(positions, stop or threading.Event())

    def make_environment(self, devices: Sequence[Device]) -> ChildEnvironment:
        """Return environment variables, CPU cores and limits for a process on these devices.

        Raises DeviceError if the devices can't be used.
        """
        environment = child_environment(devices, self._framework)
        return msgspec.structs.replace(
            environment, variables={**environment.variables, **self._network}
        )

    def start_child(
        self, rank: int, inbox: Inbox, environment: ChildEnvironment, cap_bytes: int | None
    ) -> Child:
        """Start a probe process that puts its messages into `inbox`.

        `cap_bytes` is its memory limit; None for no limit. Raises OSError if the process can't be
        started, and RuntimeError after `close`.
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
        """Return a fork server that can start a process with this environment, and a descriptor.

        The caller passes the file descriptor to the new process. Once that process has built the
        workload, it may leave a copy of itself that forks further processes, and that receives its
        requests over the descriptor. The descriptor is None if no such copy is needed.
        """
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

    def measure_taken_memory(
        self, positions: Iterable[int], unused_positions: Collection[int]
    ) -> dict[int, int]:
        """Return how much of each device's usable memory other programs hold, in bytes.

        `unused_positions` are the devices on which no probe process runs. Devices are left out if
        their use is unknown.
        """
        own = {child.pid for child in self._running if child.alive}
        return self.monitor.measure_taken_memory(positions, own, unused_positions)

    def find_neighbours(self, positions: Iterable[int]) -> dict[int, Neighbours]:
        """Return how much other programs have used each device since the last call.

        Devices whose use is unknown are left out.
        """
        own = {child.pid for child in self._running if child.alive}
        return self.monitor.find_neighbours(positions, own)

    def close(self) -> None:
        """Kill all processes and stop watching devices."""
        self._closed.set()
        with suppress(RuntimeError):  # it is already closed
            self._starter.submit(self._end_children).result()  # after a child that is being started
        self._starter.shutdown()
        self.monitor.close()


class HostService(LocalHost):
    """Manages the probe processes on one of the other hosts, on behalf of the search.

    It runs in that host's agent. Processes are addressed by keys. `script` is a copy of the user's
    script, which is written to a temporary folder; None for a built-in workload. Methods may be
    called from several threads at once.
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
        """Start a process that the caller will address by this key."""
        self._children[key] = self.start_child(key, self._inbox, environment, cap_bytes)

    def send(self, key: int, command: Command) -> None:
        """Send a command to a process.

        A build command is changed to use this host's copy of the user's script.
        """
        if isinstance(command, Build):
            command = msgspec.structs.replace(command, workload=self._workload)
        self._children[key].send(command)

    def receive(self) -> list[tuple[int, Message]]:
        """Return (key, message) for each message that processes have sent since the last call.

        Waits up to RECEIVE_SECONDS for a message; the list is empty if none arrives.
        """
        messages: list[tuple[int, Message]] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=RECEIVE_SECONDS))
            while True:
                messages.append(self._inbox.get_nowait())
        return [(key, self._restore_paths(message)) for key, message in messages]

    def find_stack(self, key: int) -> Stack | None:
        """Return the stack of the process's main thread, or None if it doesn't answer."""
        return self._children[key].find_stack()

    def end(self, key: int) -> None:
        """Kill the process with this key."""
        self._children.pop(key).end()

    def close(self) -> None:
        """Kill all processes, and remove the copy of the script."""
        super().close()
        if self._script:
            self._script.close()

    def _restore_paths(self, message: Message) -> Message:
        script = self._script
        if script is None or not isinstance(message, ChildError):
            return message
        texts = {
            name: script.restore_paths(getattr(message, name))
            for name in ("text", "where", "traceback")
        }
        return msgspec.structs.replace(message, **texts)


class RemoteChild(RunningChild):
    """A probe process on another host."""

    def __init__(self, host: RemoteHost, key: int, rank: int, inbox: Inbox) -> None:
        self.rank = rank
        self._inbox = inbox
        self.alive = True  # according to its last message
        self._host = host
        self._key = key
        self.generation = host.service.generation  # generation of the actor that it runs in

    def send(self, command: Command) -> None:
        """Send a command without waiting for its arrival."""
        self._host.service.begin("send", self._key, command)

    def find_stack(self) -> Stack | None:
        """Return the stack of the process's main thread.

        Returns None if it is unknown or the host is lost.
        """
        with suppress(HostLostError):
            stack: Stack | None = self._host.ask("find_stack", self._key)
            return stack
        return None

    def find_loss(self) -> str:
        """Return why the host is lost, or "" if it answers within ANSWER_SECONDS."""
        try:
            self._host.ask("available_memory_bytes", seconds=ANSWER_SECONDS)
        except HostLostError as lost:
            return lost.message
        return ""

    def end(self) -> None:
        """Kill the process."""
        self._host.forget(self._key)

    def receive(self, message: Message) -> None:
        """Put a message from the process into the inbox of its group."""
        self.alive = not isinstance(message, Exited | HostLost)
        self._inbox.put((self.rank, message))


class RemoteHost:
    """Connection to the processes and devices of another host.

    Methods raise HostLostError if the agent there doesn't answer. `script` is the user's script to
    copy to the host; None for a built-in workload.
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

    def ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the HostService on the remote host, and return its result.

        If the service has died, it is restarted once, and the call is repeated. Raises
        HostLostError if the host doesn't answer.
        """
        if self._lost is not None:
            raise self._lost
        generation = self.service.generation
        try:
            return self.service.ask(method, *arguments, **keywords)
        except ActorLostError:
            if not self._recover(generation):
                raise
        return self.service.ask(method, *arguments, **keywords)

    def _recover(self, generation: int) -> bool:
        """Restart the HostService after it has died; its probe processes count as killed.

        `generation` is the number of restarts before the call that failed. Returns False if the
        service can't be restarted.
        """
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
        """Start a probe process on the remote host.

        Raises HostLostError if the host doesn't answer.
        """
        key = next(self._keys)
        self._children[key] = child = RemoteChild(self, key, rank, inbox)
        try:
            self.service.ask("begin_child", key, environment, cap_bytes)
        except ActorLostError:
            if not self._recover(child.generation):  # otherwise the child is reported as killed
                raise
        return child

    def forget(self, key: int) -> None:
        """Kill a process, and ignore its later messages."""
        if self._children.pop(key, None) is not None and not self._closed.is_set():
            with suppress(HostLostError):
                self.ask("end", key)

    def wait_for_drivers(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait until the drivers on the remote host answer.

        Raises StoppedError once `stop` is set.
        """
        self.ask("wait_for_drivers", tuple(positions), stop=stop)
        if stop.is_set():
            raise StoppedError

    def close(self) -> None:
        """End the HostService on the remote host, and all of its probe processes."""
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
        """Record that the host is lost, and report this to the groups of its processes."""
        if not isinstance(error, HostLostError):
            error = HostLostError(self._name, f"failed: {error}")
        self._lost = error
        for child in tuple(self._children.values()):
            child.receive(HostLost(self._lost.message))


class Hosts:
    """All hosts that have devices in a request; this machine may be one of them.

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
        """Return for each rank the address at which the ranks meet to form a process group.

        For PyTorch on one host, this is the path of a file in memory, else "address:port" with a
        free port.
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
        """Wait until the drivers of these devices answer.

        Raises GroupError if a driver is lost, and StoppedError once `stop` is set.
        """
        for host in self._with_drivers(positions):
            host.wait_for_drivers(positions, stop)

    def read(self, positions: Collection[int]) -> Mapping[int, Vitals]:
        """Return the latest driver readings of these devices by position.

        Raises GroupError if a device or its driver is lost.
        """
        found: dict[int, Vitals] = {}
        for host in self._with_drivers(positions):
            found |= host.ask("monitor.read", tuple(positions))
        return found

    def measure_taken_memory(
        self, positions: Collection[int], unused_positions: Collection[int]
    ) -> dict[int, int]:
        """Return how much of each device's usable memory other programs hold, in bytes.

        `unused_positions` are the devices on which no probe process runs. Devices are left out if
        their use is unknown.
        """
        found: dict[int, int] = {}
        for host in self._among(positions):
            found |= host.ask("measure_taken_memory", tuple(positions), set(unused_positions))
        return found

    def find_neighbours(self, positions: Collection[int]) -> Mapping[int, Neighbours]:
        """Return how much other programs have used each GPU since the last call.

        GPUs whose use is unknown are left out.
        """
        found: dict[int, Neighbours] = {}
        for host in self._with_drivers(positions):
            found |= host.ask("find_neighbours", tuple(positions))
        return found

    def available_memory_bytes(self) -> int:
        """Return the free memory of the host that has the least, in bytes.

        Returns 0 if all hosts are lost.
        """
        sizes: list[int] = []
        for host in self._by_name.values():
            with suppress(HostLostError):
                sizes.append(host.ask("available_memory_bytes"))
        return min(sizes, default=0)

    def close(self) -> None:
        """Kill all processes on all hosts."""
        for host in self._by_name.values():
            host.close()

    def _among(self, positions: Collection[int]) -> Iterator[LocalHost | RemoteHost]:
        for name in dict.fromkeys(self._devices[position].host for position in positions):
            yield self._by_name[name]

    def _with_drivers(self, positions: Collection[int]) -> Iterator[LocalHost | RemoteHost]:
        """Yield the hosts that have GPUs among these positions; CPU slices have no driver."""
        return self._among(
            [position for position in positions if not self._devices[position].on_cpu]
        )
