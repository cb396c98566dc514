"""Forks probe processes from a copy of a process that has built the user's model.

A model with a billion parameters takes 20 s to build. The copy is made before the model is moved to
a device. Processes forked from it share its memory until they write to it, and start within a
moment. No copy is made if the build was quick, or if it left something behind that doesn't survive
a fork (`forkable.py`).
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
from .forkable import BuildWatch, list_driver_files
from .protocol import Build

WORTH_SECONDS = 2.0  # a shorter build is simply repeated in each child
BUILDER = "evener.workloads.torch_backend.shared_build"
QUICK = "it was quick"


class SharedRecipe:
    """A user's workload that was built before its model was moved to a device.

    Processes that are forked afterwards share it. Each of them then finishes it for its own device.
    """

    def __init__(self, command: Build, recipe: Any) -> None:
        self._key = _key(command)
        self._recipe = recipe
        # of the fork server, which is the parent of the child that built it
        self.server_pid = os.getppid()

    def suits(self, command: Build) -> bool:
        """Return whether a build command asks for this workload, with the same settings."""
        return _can_share(command) and _key(command) == self._key

    def finish(self, setup: WorkerSetup) -> Workload:
        """Move the workload's model to the device of this process, and return the workload."""
        workload: Workload = self._recipe.finish(setup)
        return workload


class BuildChannel:
    """A probe process's end of the socket over which its parent requests more processes.

    The process builds the workload, and may then leave a copy of itself that has the workload in
    memory. The copy answers the requests: it forks the new processes, which each execute `run`.
    """

    def __init__(
        self, descriptor: int, run: Callable[[int, int, SharedRecipe | None], object]
    ) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._run = run
        self.seconds = 0.0  # how long the build took
        self.obstacle = ""  # why other processes have to build again; "" if they don't

    def build(self, command: Build) -> SharedRecipe | None:
        """Build the user's workload, then fork a copy of this process that keeps it in memory.

        Later probe processes are forked from the copy instead of building again. No copy is made if
        the build was quick, or if the process can't be forked; the reason is sent over the channel.
        Returns None, without building, for a workload that can't be shared.
        """
        with self._socket:
            setup = command.setup
            # ranks of a group must meet before they build; a sharded model stays on the host
            if not _can_share(command) or setup.world > 1 or setup.state:
                return None
            builder = import_module(BUILDER)
            builder.ask_driver()
            watch, started = BuildWatch(), time.monotonic()
            with watch.watching(), builder.wrap_rank_functions(watch.recording):
                recipe = builder.BuiltRecipe(command.workload, command.settings)
            shared = SharedRecipe(command, recipe)
            self.seconds = time.monotonic() - started
            if self.seconds < WORTH_SECONDS:
                self._report(QUICK)
                return shared
            self.obstacle = watch.find_obstacle(recipe.compute_in_copy)
            if not self.obstacle:
                self.obstacle = self._leave_copy(shared)
            if self.obstacle:
                self._report(self.obstacle)
            return shared

    def _report(self, why: str) -> None:
        """Send why no copy was made."""
        with suppress(OSError):
            self._socket.send(msgspec.json.encode(BuildShared(why)))

    def _leave_copy(self, shared: SharedRecipe) -> str:
        """Fork a copy of this process that forks more processes on request.

        Returns why that failed, or "".
        """
        gc.collect()
        try:
            pid = os.fork()
        except OSError as error:
            return f"fork: {error}"
        if not pid:
            self._serve(shared)
        return ""

    def _serve(self, shared: SharedRecipe) -> None:
        """Serve requests in the copy of this process: fork a process for each.

        When the channel is closed, the copy exits. So this function never returns.
        """
        try:
            os.setsid()  # killing the child's process group then doesn't kill the copy
            _close_all_but(self._socket.fileno())
            gc.freeze()
            with suppress(OSError):
                self._socket.send(msgspec.json.encode(BuildShared()))
            ForkServer(self._socket, lambda own, more: self._run(own, more, shared)).serve()
        finally:
            os._exit(0)


def _can_share(command: Build) -> bool:
    """Return whether one build of this workload can serve several processes."""
    # the user's own workloads in PyTorch
    own = command.framework == "torch" and ":" in command.workload
    return own and not command.setup.placement


def _key(command: Build) -> tuple[str, str]:
    return command.workload, repr(sorted(command.settings.items()))


def _close_all_but(kept_descriptor: int) -> None:
    """Close all file descriptors except for `kept_descriptor` and those of GPU drivers."""
    # while a copy has the child's pipes open, their reader sees no end of file after the child's
    # exit
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    first = 3
    for number in sorted({kept_descriptor, *list_driver_files()}):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
