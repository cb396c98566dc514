"""A host of the Ray cluster: its children and drivers, through evener's actor there.

A thread waits for what the children there send, and puts it where a child of this machine would.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from evener.devices.backend import ChildEnvironment
from evener.devices.cluster.agents import HostLostError, find_agent
from evener.devices.types import Device
from evener.devices.vitals import Vitals

from .child import Exited, HostLost, Inbox, Message
from .child_group import StoppedError
from .host_servant import HostServant
from .launch_plan import LOOPBACK
from .protocol import Command
from .script_copy import ScriptCopy
from .stack_dump import Stack

SILENT_SECONDS = 15.0  # a host that is silent for longer has gone;
ANSWER_SECONDS = 3.0  # or for longer than this, when a rank elsewhere has failed


class RemoteChild:
    """A child on another host, as a group uses it."""

    def __init__(self, host: RemoteHost, key: int, rank: int, inbox: Inbox) -> None:
        self.rank, self._inbox = rank, inbox
        self.alive = True  # by its last message
        self._host, self._key = host, key

    def send(self, command: Command) -> None:
        """Send a command; if the child is gone, the inbox says so."""
        self._host.post("send", self._key, command)

    def sample_memory(self) -> None:
        """Do nothing: the child's own host samples its memory."""

    def find_stack(self) -> Stack | None:
        """The stack of the child as it is now; None if it doesn't answer."""
        with suppress(HostLostError):
            stack: Stack | None = self._host.ask("find_stack", self._key)
            return stack
        return None

    def find_loss(self) -> str:
        """The reason why the child's host doesn't answer; empty if it does."""
        return self._host.find_loss()

    def end(self) -> None:
        """Kill the child now."""
        self._host.forget(self._key)

    def receive(self, message: Message) -> None:
        """Take a message from the child, or one that says that its host has gone."""
        self.alive = not isinstance(message, Exited | HostLost)
        self._inbox.put((self.rank, message))


class RemoteHost:
    """One host of the cluster; HostLostError if its actor doesn't answer."""

    def __init__(
        self, devices: Sequence[Device], framework: str, workload: str, name: str, script: ScriptCopy | None
    ) -> None:
        self._name = name
        self._gpus = {i for i, device in enumerate(devices) if device.host == name and not device.on_cpu}
        self._servant = find_agent(name).keep(HostServant, tuple(devices), framework, workload, name, script)
        self._keys = itertools.count()
        self._children: dict[int, RemoteChild] = {}
        self._lost: HostLostError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._receive, name=f"children on {name}", daemon=True).start()

    def ask(self, method: str, *arguments: Any, stop: threading.Event | None = None) -> Any:
        """Call a method of the servant and wait for its answer."""
        if self._lost is not None:
            raise self._lost
        return self._servant.ask(method, *arguments, stop=stop)

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method of the servant without waiting."""
        self._servant.begin(method, *arguments)

    def find_loss(self) -> str:
        """Why the host doesn't answer; empty if it does."""
        try:
            self._servant.ask("local.available_memory_bytes", seconds=ANSWER_SECONDS)
        except HostLostError as lost:
            return lost.message
        return ""

    def start_child(self, rank: int, inbox: Inbox, environment: ChildEnvironment, cap_bytes: int | None) -> RemoteChild:
        """A new child there."""
        key = next(self._keys)
        self._children[key] = child = RemoteChild(self, key, rank, inbox)
        self.ask("start_child", key, environment, cap_bytes)
        return child

    def forget(self, key: int) -> None:
        """Kill a child, unless its host has gone."""
        if self._children.pop(key, None) is not None and not self._closed.is_set():
            with suppress(HostLostError):
                self.ask("end", key)

    def make_environment(self, devices: Sequence[Device], mps: bool) -> ChildEnvironment:
        """The environment that a child is started with on the remote host."""
        found: ChildEnvironment = self.ask("local.make_environment", tuple(devices), mps)
        return found

    def find_addresses(self, count: int, address: str = LOOPBACK) -> tuple[str, ...]:
        """Free ports there."""
        found: tuple[str, ...] = self.ask("local.find_addresses", count, address)
        return found

    def wait_for_drivers(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait for the answers of its GPUs' drivers; StoppedError if `stop` is set before."""
        if self._gpus.intersection(positions):
            self.ask("wait_for_drivers", tuple(positions), stop=stop)
            if stop.is_set():
                raise StoppedError

    def read(self, positions: Iterable[int]) -> Mapping[int, Vitals]:
        """The drivers' present readings of the remote host's GPUs among `positions`."""
        found: Mapping[int, Vitals] = {}
        if self._gpus.intersection(positions):
            found = self.ask("local.read", tuple(positions))
        return found

    def measure_short(self, positions: Iterable[int], clean: Collection[int]) -> dict[int, int]:
        """The bytes of memory that other processes hold on the remote host's devices, by position."""
        found: dict[int, int] = self.ask("local.measure_short", tuple(positions), set(clean))
        return found

    def available_memory_bytes(self) -> int:
        """Memory that can still be had there."""
        found: int = self.ask("local.available_memory_bytes")
        return found

    def close(self) -> None:
        """Kill every child there; safe to call twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._servant.close()

    def _receive(self) -> None:
        while not self._closed.is_set():
            try:
                messages = self._servant.ask("receive", seconds=SILENT_SECONDS)
            except Exception as error:
                self._lose(error)
                return
            for key, message in messages:
                if (child := self._children.get(key)) is not None:
                    child.receive(message)

    def _lose(self, error: Exception) -> None:
        """The host has gone: so have its children."""
        self._lost = error if isinstance(error, HostLostError) else HostLostError(self._name, f"failed: {error}")
        for child in tuple(self._children.values()):
            child.receive(HostLost(self._lost.message))
