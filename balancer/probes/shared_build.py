"""A child that builds the user's model leaves a copy of itself, which forks later children with it.

A model of a billion parameters takes 20 s to build. The copy is made before the model goes to a
device. Its children share its memory until they write to it, and start in a moment. There is no
copy if the build left something that a fork doesn't survive (`forkable.py`), or was quick.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgspec

from evener.workloads.protocol import WorkerSetup, Workload

from .fork_server import BuildShared, ForkServer
from .forkable import BuildWatch
from .protocol import Build

WORTH_SECONDS = 2.0  # a build that takes less is repeated in each child
BUILDER = "evener.workloads.torch_backend.shared_build"
QUICK = "it was quick"


class SharedRecipe:
    """A recipe that was built from these words of a command, for any device and group."""

    def __init__(self, command: Build, recipe: Any) -> None:
        self._key = _key(command)
        self._recipe = recipe
        self.server_pid = os.getppid()  # of the fork server, the parent of the child that built it

    def suits(self, command: Build) -> bool:
        """True if the command would build the same recipe."""
        return _can_share(command) and _key(command) == self._key

    def finish(self, setup: WorkerSetup) -> Workload:
        """Return the workload for a worker's setup."""
        workload: Workload = self._recipe.finish(setup)
        return workload


class BuildChannel:
    """The channel on which a copy of this child may fork children.

    `run` is called in them, with the copy's pid, the descriptor of another such channel and the
    recipe.
    """

    def __init__(
        self, descriptor: int, run: Callable[[int, int, SharedRecipe | None], object]
    ) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._run = run

    def build(self, command: Build) -> SharedRecipe | None:
        """Build the command's recipe and leave a copy of this process, if possible.

        Return None if the command's workload can't be shared. Exceptions of the user's code
        propagate.
        """
        with self._socket:
            setup = command.setup
            # ranks of a group build after they have met; a sharded model stays on the host
            if not _can_share(command) or setup.world > 1 or setup.state:
                return None
            builder = import_module(BUILDER)
            watch, started = BuildWatch(), time.monotonic()
            with watch.watching(), builder.noting_ranks(watch.noting):
                recipe = builder.BuiltRecipe(command.workload, command.settings)
            shared = SharedRecipe(command, recipe)
            quick = time.monotonic() - started < WORTH_SECONDS
            obstacle = QUICK if quick else watch.find_obstacle()
            if not obstacle:
                obstacle = self._leave_copy(shared)
            if obstacle:
                with suppress(OSError):
                    self._socket.send(msgspec.json.encode(BuildShared(obstacle)))
            return shared

    def _leave_copy(self, shared: SharedRecipe) -> str:
        """Fork the copy. Return why that failed; empty if it didn't."""
        gc.collect()
        try:
            pid = os.fork()
        except OSError as error:
            return f"fork: {error}"
        if not pid:
            self._serve(shared)
        return ""

    def _serve(self, shared: SharedRecipe) -> None:
        """Fork children as requested until the channel closes. Never returns."""
        try:
            os.setsid()  # the end of the child's process group doesn't end it
            _close_all_but(self._socket.fileno())
            gc.freeze()
            with suppress(OSError):
                self._socket.send(msgspec.json.encode(BuildShared()))
            ForkServer(self._socket, lambda own, more: self._run(own, more, shared)).serve()
        finally:
            os._exit(0)


def _can_share(command: Build) -> bool:
    """True if another process may build the command's workload: the user's own, in PyTorch."""
    own = command.framework == "torch" and ":" in command.workload
    return own and not command.setup.placement


def _key(command: Build) -> tuple[str, str]:
    return command.workload, repr(sorted(command.settings.items()))


def _close_all_but(kept: int) -> None:
    """Close every descriptor but one. The standard streams lead nowhere afterwards.

    They belong to the child: its reader would otherwise wait for this process's end.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
