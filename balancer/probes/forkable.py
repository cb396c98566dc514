"""Decides whether a process in which the user's code has built a model can be forked.

A fork copies the memory and only the thread that calls it: other threads don't exist in the copy.
Both processes share the position in an open file, and a device's driver doesn't survive. If a build
reads anything about its rank, the result would be the same in each copy. So all of these rule out a
fork.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evener.devices.cpu import available_memory_bytes
from evener.devices.registry import all_backends
from evener.workloads.user_code import is_user_file

# variables to which launchers give different values on each rank
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
FRAMES = 4  # call frames between the user's line and a lookup: os.getenv, get, the lookup


def has_started_driver() -> bool:
    """True if this process has opened a device's driver."""
    names = [name for backend in all_backends() for name in backend.driver_files]
    return any(name in path for path in _open_files().values() for name in names)


class BuildWatch:
    """Watches the user's build for anything that rules out a fork.

    It compares the process with its state before the build, and records what the build asks about
    its rank.
    """

    def __init__(self) -> None:
        self._threads = _count_threads()
        self._files = _open_files()
        self._asked = ""  # the first thing about the rank that the user's code asked for

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record when the user's code reads a variable whose value differs by rank.

        The environment is watched inside the `with` block.
        """
        late = tuple(prefix for backend in all_backends() for prefix in backend.late_variables)
        kind = type(os.environ)
        look_up = kind.__getitem__

        def note(environment: Any, name: Any) -> Any:
            if isinstance(name, str) and (name in RANK_VARIABLES or name.startswith(late)):
                self.note(f"the variable {name}")
            return look_up(environment, name)

        kind.__getitem__ = note  # type: ignore[method-assign]
        try:
            yield
        finally:
            kind.__getitem__ = look_up  # type: ignore[method-assign]

    def noting(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a wrapper of `function` that records `what` if the user's code calls it.

        `what` names what the function returns, for messages.
        """

        def ask(*arguments: Any, **keywords: Any) -> Any:
            self.note(what)
            return function(*arguments, **keywords)

        return ask

    def note(self, what: str) -> None:
        """Record that `what` was asked for, if the user's own code asked for it."""
        frame = sys._getframe(1)
        for _ in range(FRAMES):
            if frame.f_back is None:
                return
            frame = frame.f_back
            if is_user_file(frame.f_code.co_filename):
                self._asked = self._asked or what
                return

    def find_obstacle(self) -> str:
        """Return why this process can't be forked now, as a clause; "" if it can be."""
        if has_started_driver():
            return "it starts a device's driver"
        if self._asked:
            return f"it reads {self._asked}, which differs between ranks"
        if _count_threads() > self._threads or threading.active_count() > 1:
            return "it leaves a thread running"
        if _has_children():
            return "it leaves a process running"
        files = sorted({*_open_files().values()} - {*self._files.values()})
        if files:
            return f"it leaves {files[0]} open"
        if available_memory_bytes() < _resident_bytes():
            return "there is too little host memory for a copy"
        return ""


def _count_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _open_files() -> dict[int, str]:
    """Return the target of each open file descriptor of this process."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            found[int(entry.name)] = os.readlink(entry)
    return {number: path for number, path in found.items() if path != f"/proc/{os.getpid()}/fd"}


def _has_children() -> bool:
    with suppress(OSError):
        return any(path.read_text().strip() for path in Path("/proc/self/task").glob("*/children"))
    return False


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
