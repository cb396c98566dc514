"""The side of a session that runs on another host: a LocalHost there, with a key for each of its children."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Sequence

import msgspec

from evener.devices.backend import ChildEnvironment
from evener.devices.types import Device

from .child import Child, Inbox, Message
from .child_group import TICK_SECONDS
from .local_host import LocalHost
from .protocol import Build, ChildError, Command
from .script_copy import ScriptCopy, WrittenScript
from .stack_dump import Stack

RECEIVE_SECONDS = 2.0  # without a message, after which the caller hears that there is none
INBOX = 10_000


class HostServant:
    """One host's children; `local` has its drivers. Both are called from another machine, each call in its thread."""

    def __init__(
        self, devices: Sequence[Device], framework: str, workload: str, name: str, script: ScriptCopy | None
    ) -> None:
        self._script = WrittenScript(script) if script else None
        function = workload.rpartition(":")[2]
        self._workload = f"{self._script.path}:{function}" if self._script else workload
        self.local = LocalHost(devices, framework, self._workload, name)
        self._inbox: Inbox = queue.Queue(INBOX)
        self._children: dict[int, Child] = {}

    def start_child(self, key: int, environment: ChildEnvironment, cap_bytes: int | None) -> None:
        """Start a child."""
        self._children[key] = self.local.start_child(key, self._inbox, environment, cap_bytes)

    def send(self, key: int, command: Command) -> None:
        """Send a child a command; the user's script lies elsewhere here."""
        if isinstance(command, Build):
            command = msgspec.structs.replace(command, workload=self._workload)
        self._children[key].send(command)

    def receive(self) -> list[tuple[int, Message]]:
        """The messages that children have sent, with the children's keys; waits a limited time for the first one."""
        messages: list[tuple[int, Message]] = []
        deadline = time.monotonic() + RECEIVE_SECONDS
        while not messages and time.monotonic() < deadline:
            try:
                messages.append(self._inbox.get(timeout=TICK_SECONDS))
            except queue.Empty:
                for child in tuple(self._children.values()):
                    child.sample_memory()
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return [(key, self._name_origin(message)) for key, message in messages]

    def find_stack(self, key: int) -> Stack | None:
        """The stack of a child as it is now."""
        return self._children[key].find_stack()

    def end(self, key: int) -> None:
        """Kill a child."""
        self._children.pop(key).end()

    def wait_for_drivers(self, positions: Collection[int]) -> None:
        """Wait for the drivers' answers."""
        self.local.wait_for_drivers(positions, threading.Event())

    def close(self) -> None:
        """Kill every child, and remove the script."""
        self.local.close()
        if self._script:
            self._script.close()

    def _name_origin(self, message: Message) -> Message:
        script = self._script
        if script is None or not isinstance(message, ChildError):
            return message
        texts = {name: script.name_origin(getattr(message, name)) for name in ("text", "where", "traceback")}
        return msgspec.structs.replace(message, **texts)
