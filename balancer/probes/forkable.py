"""Decides whether a process that has built the user's model can be forked.

Four things rule out a fork:

- Threads other than the one that forks, because they don't exist in the copy. Some libraries, such
  as OpenBLAS, end their threads before each fork and start them again when needed. Such threads
  don't matter. A trial fork shows which threads remain.
- Open files, because both processes would share the position in them. Open files of a driver don't
  count: they may only be open because of its management library, such as NVML. A trial fork then
  shows whether the driver can still be started in a copy.
- A device's driver that has started, because it doesn't survive a fork.
- A build that reads anything about its rank, because each copy would have the same result.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from evener.devices.cpu import available_memory_bytes
from evener.devices.registry import all_backends
from evener.workloads.user_code import is_user_file

# variables to which launchers give different values on each rank
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# seconds in which a copy must have computed a little on all threads; it takes milliseconds, but the
# cores may be busy
TRIAL_SECONDS = 20.0
POLL_SECONDS = 0.01
# names of native threads that a copy doesn't need: jemalloc, which comes with pyarrow, only frees
# unused memory in its thread, and has none in a forked process
NOT_NEEDED = ("jemalloc_bg_thd",)
FRAMES = 4  # call frames between the user's line and a lookup: os.getenv, get, the lookup


def has_started_driver() -> bool:
    """Return whether this process has started a GPU driver, after which it can't be forked."""
    files = [*_open_files().values()]
    return any(backend.has_started_driver(files) for backend in all_backends())


def list_driver_files() -> list[int]:
    """Return the file descriptors of GPU drivers that this process has open."""
    return [number for number, path in _open_files().items() if _is_of_driver(path)]


def survives_fork(trial: Callable[[], object]) -> bool:
    """Return whether a forked copy of this process can run `trial` without an error."""
    try:
        return _call_in_copy(trial) == 0
    except OSError:
        return False


class BuildWatch:
    """Watches the user's code build a workload, to decide whether the process can be forked.

    Create it before the build. A fork is impossible if the build left threads or open files behind,
    or asked for this process's rank.
    """

    def __init__(self) -> None:
        self._threads = _list_threads()
        self._files = _open_files()
        self._asked = ""  # the first thing about the rank that the user's code asked for

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that records which environment variables about the rank are read.

        While it is active, lookups in `os.environ` are intercepted.
        """
        late = tuple(prefix for backend in all_backends() for prefix in backend.late_variables)
        kind = type(os.environ)
        look_up = kind.__getitem__

        def note(environment: Any, name: Any) -> Any:
            if isinstance(name, str) and (name in RANK_VARIABLES or name.startswith(late)):
                self.record_use(f"the variable {name}")
            return look_up(environment, name)

        kind.__getitem__ = note  # type: ignore[method-assign]
        try:
            yield
        finally:
            kind.__getitem__ = look_up  # type: ignore[method-assign]

    def recording(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Wrap a function that returns something about the rank, so that its use is recorded.

        Only calls from the user's code are recorded. `what` names the returned information, and is
        shown in messages.
        """

        def ask(*arguments: Any, **keywords: Any) -> Any:
            self.record_use(what)
            return function(*arguments, **keywords)

        return ask

    def record_use(self, what: str) -> None:
        """Record that the user's code has asked for something that differs between ranks.

        `what` names it, and is shown in messages. Calls that don't come from the user's code are
        ignored.
        """
        frame = sys._getframe(1)
        for _ in range(FRAMES):
            if frame.f_back is None:
                return
            frame = frame.f_back
            if is_user_file(frame.f_code.co_filename):
                self._asked = self._asked or what
                return

    def find_obstacle(self, trial: Callable[[bool], object] = lambda _: None) -> str:
        """Return why this process can't be copied for other ranks, or "" if it can.

        `trial` is called in a forked copy, where it should compute a little with all threads: it
        hangs if the threads of a library are missing there. Its argument is True if files of a
        driver are open; it should then start the driver.
        """
        if has_started_driver():
            return "it starts a device's driver"
        if self._asked:
            return f"it reads {self._asked}, which differs between ranks"
        if threading.active_count() > 1:
            return "it leaves a thread running"
        if _has_children():
            return "it leaves a process running"
        opened = sorted({*_open_files().values()} - {*self._files.values()})
        of_driver = [name for name in opened if _is_of_driver(name)]
        files = [name for name in opened if name not in of_driver]
        if files:
            return f"it leaves {files[0]} open"
        if available_memory_bytes() < _resident_bytes():
            return "there is too little host memory for a copy"
        return self._try_fork(lambda: trial(bool(of_driver)))

    def _try_fork(self, trial: Callable[[], object]) -> str:
        """Run `trial` in a forked copy; return why the copy failed, or "" if it succeeded."""
        try:
            code = _call_in_copy(trial)
        except OSError as error:
            return f"fork: {error}"
        if _list_threads() - self._threads:
            return "it leaves a thread running"
        if code is None:
            return f"a copy of it hangs for {TRIAL_SECONDS:.0f} s when it computes"
        return f"a copy of it can't compute (exit code {code})" if code else ""


def _call_in_copy(trial: Callable[[], object]) -> int | None:
    """Call a function in a forked copy of this process.

    Returns the copy's exit code, or None if the copy hangs.
    """
    pid = os.fork()
    if not pid:
        _run_and_exit(trial)
    return _wait_for(pid, time.monotonic() + TRIAL_SECONDS)


def _run_and_exit(trial: Callable[[], object]) -> NoReturn:
    """Call a function, and exit the process with code 0 if it returns, else 1."""
    code = 1
    try:
        trial()
        code = 0
    finally:
        os._exit(code)


def _wait_for(pid: int, deadline: float) -> int | None:
    """Return the exit code of a process, or kill it at the deadline and return None."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _list_threads() -> set[str]:
    """Return the ids of all threads of this process."""
    # also of threads that Python doesn't know
    found = set()
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            if (path / "comm").read_text().strip() not in NOT_NEEDED:
                found.add(path.name)
    return found


def _open_files() -> dict[int, str]:
    """Return the paths of open files by their descriptors."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            found[int(entry.name)] = os.readlink(entry)
    return {number: path for number, path in found.items() if path != f"/proc/{os.getpid()}/fd"}


def _is_of_driver(path: str) -> bool:
    return path.startswith(tuple(name for one in all_backends() for name in one.driver_files))


def _has_children() -> bool:
    with suppress(OSError):
        return any(path.read_text().strip() for path in Path("/proc/self/task").glob("*/children"))
    return False


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
