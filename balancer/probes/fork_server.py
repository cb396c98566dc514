"""Fork server: a process that has imported the framework, and forks probe processes.

Forked processes start without the delay of imports. `ForkServer` runs in the server's process. It
reads requests from a socket, one per datagram, and answers them. It never imports the user's own
code. When the other end of its socket closes, it kills the processes that it has forked, and exits.
`ServerProcess` is the other end, in the parent.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Protocol

import msgspec

from evener.devices.backend import ChildEnvironment
from evener.devices.registry import import_path

from .forkable import has_started_driver, list_driver_files, survives_fork
from .protocol import STACK_SIGNAL

LONGEST_REQUEST = 1 << 20  # bytes of the environment variables of a child
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
MODULE = "evener.balancer.probes.worker"
WAIT_SECONDS = 2.0  # timeout for a killed process to be reaped
LOG_BYTES = 64 << 10  # bytes at the end of a server's output that are kept


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Request: fork a process with these environment variables and CPU cores.

    Its standard streams are sent along as file descriptors.
    """

    key: int  # identifies the child at both ends
    folder: str  # its working folder
    variables: dict[str, str]
    cores: tuple[int, ...] = ()  # empty: all


class SignalRequest(msgspec.Struct, frozen=True, tag=True):
    """Request: send a signal to a process, or to its whole process group."""

    key: int
    number: int
    group: bool = False


class ChildForked(msgspec.Struct, frozen=True, tag=True):
    """Answer: a process was forked."""

    key: int
    pid: int


class ChildExited(msgspec.Struct, frozen=True, tag=True):
    """Answer: a process has exited; the code is negative for a signal."""

    key: int
    code: int
    peak_bytes: int = 0  # its peak memory


class BuildShared(msgspec.Struct, frozen=True, tag=True):
    """Answer: whether a probe process has left a copy of itself that can fork more processes.

    The copy holds the built workload. `obstacle` is the reason if there is no copy, else "".
    """

    obstacle: str = ""


_decoder: msgspec.json.Decoder[ForkRequest | SignalRequest] = msgspec.json.Decoder(
    ForkRequest | SignalRequest
)
_answer_decoder: msgspec.json.Decoder[ChildForked | ChildExited | BuildShared] = (
    msgspec.json.Decoder(ChildForked | ChildExited | BuildShared)
)
STREAMS = 3  # the standard streams of a child
NO_CHANNEL = -1


class ForkServer:
    """Forks a process for each request that arrives over a socket.

    Each new process calls `run` with the server's process id, and with a file descriptor for
    sharing its built workload, or NO_CHANNEL.
    """

    def __init__(self, channel: socket.socket, run: Callable[[int, int], object]) -> None:
        self._channel = channel
        self._run = run
        self._own = os.getpid()
        self._pids: dict[int, int] = {}  # key -> pid of a child that hasn't been reaped
        self._keys: dict[int, int] = {}  # pidfd of such a child -> key

    def serve(self) -> None:
        """Serve requests until the other end closes the socket, then kill all processes."""
        while True:
            channel = self._channel.fileno()
            ready, _, _ = select.select([channel, *self._keys], [], [])
            for descriptor in ready:
                if descriptor != channel:
                    self._reap(descriptor)
            if channel in ready and not self._carry_out():
                break
        for key in self._pids:
            self._send_signal(SignalRequest(key, signal.SIGKILL, True))

    def _carry_out(self) -> bool:
        """Receive and carry out one request.

        Returns False if the socket was closed.
        """
        data, descriptors, _, _ = socket.recv_fds(self._channel, LONGEST_REQUEST, STREAMS + 1)
        if not data:
            return False
        match _decoder.decode(data):
            case ForkRequest() as start:
                self._fork(start, descriptors)
            case SignalRequest() as request:
                self._send_signal(request)
        return True

    def _fork(self, start: ForkRequest, streams: Sequence[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(streams[2], f"fork: {error}".encode())
            self._answer(ChildExited(start.key, 1))
        else:
            if not pid:
                self._run_as_child(start, streams)
            self._pids[start.key] = pid
            self._keys[os.pidfd_open(pid)] = start.key
            self._answer(ChildForked(start.key, pid))
        finally:
            for descriptor in streams:
                os.close(descriptor)

    def _run_as_child(self, start: ForkRequest, streams: Sequence[int]) -> None:
        """Set up the new process (streams, folder, variables and cores), and call `run` in it."""
        try:
            os.setsid()  # it becomes the leader of its own process group
            standard, more = streams[:STREAMS], streams[STREAMS:]
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            for descriptor in (self._channel.fileno(), *standard, *self._keys):
                os.close(descriptor)
            os.chdir(start.folder)
            os.environ.update(start.variables)
            os.sched_setaffinity(0, start.cores or os.sched_getaffinity(0))
            self._run(self._own, more[0] if more else NO_CHANNEL)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self, descriptor: int) -> None:
        key = self._keys.pop(descriptor)
        os.close(descriptor)
        _, status, used = os.wait4(self._pids.pop(key), 0)
        self._answer(ChildExited(key, os.waitstatus_to_exitcode(status), used.ru_maxrss << 10))

    def _send_signal(self, request: SignalRequest) -> None:
        pid = self._pids.get(request.key)
        if pid is None:
            return
        try:
            (os.killpg if request.group else os.kill)(pid, request.number)
        except ProcessLookupError:  # it has no process group of its own yet
            os.kill(pid, request.number)

    def _answer(self, answer: ChildForked | ChildExited) -> None:
        with suppress(OSError):
            self._channel.send(msgspec.json.encode(answer))


def import_first(names: Sequence[str], start_driver: Callable[[], object]) -> None:
    """Import modules before forking, so that forked processes needn't import them.

    Names have the form "module" or "module:attribute". If forking is impossible afterwards, for
    example because a GPU driver was started, the program restarts itself without the imports.
    `start_driver` is tried in a forked copy if driver files are open.
    """
    try:
        for name in names:
            module, _, attribute = name.partition(":")
            getattr(import_module(module), attribute or "__name__")
        # a process that runs a driver can't be forked
        forkable = not has_started_driver()
        if forkable and list_driver_files():
            forkable = survives_fork(start_driver)
    except Exception:
        forkable = False  # a child imports it again, and reports the error
    if names and not forkable:
        # until the program that starts now can handle the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
        os.execv(sys.executable, sys.orig_argv[: -len(names)])
    # all children share these objects, so collections needn't visit them, which would copy them
    gc.freeze()


def die_with_parent() -> None:
    """Make Linux kill this process when the thread that started it exits."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents exit."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ForkedChild(Protocol):
    """A forked process, whose process id and exit are recorded here by its fork server."""

    pid: int  # 0 until it runs

    def finish(self, code: int, peak_bytes: int = 0) -> None:
        """Record the exit code, negative for a signal, and the peak memory."""


class ChildServer(ABC):
    """Connection to a fork server: starts processes, and records their exits."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._keys = itertools.count()
        self._children: dict[int, ForkedChild] = {}
        self._reader = threading.Thread(target=self._read, name="fork server", daemon=True)

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the server can start processes."""

    @abstractmethod
    def read_log(self) -> bytes:
        """Return the end of the fork server's own output."""

    @abstractmethod
    def close(self) -> None:
        """Stop the server and all of its processes."""

    @abstractmethod
    def _wait(self) -> int:
        """Wait for the server's exit, and return its code."""

    def start(
        self, child: ForkedChild, environment: ChildEnvironment, streams: Sequence[int]
    ) -> int:
        """Fork a process, and return the key by which the server identifies it.

        `streams` are the file descriptors of the process's standard streams; they are closed on
        this side. Raises OSError if the request can't be sent although the server is running.
        """
        key = next(self._keys)
        self._children[key] = child
        try:
            request = msgspec.json.encode(
                ForkRequest(key, os.getcwd(), environment.variables, environment.cores)
            )
            socket.send_fds(self._channel, [request], streams)
        except OSError:
            self._reader.join(WAIT_SECONDS)
            if self._reader.is_alive():
                raise
            child.finish(self._wait())
        finally:
            for stream in streams:
                os.close(stream)
        return key

    def send_signal(self, key: int | None, number: int, group: bool = False) -> None:
        """Send a signal to the process with this key, or to its whole process group.

        None as the key means the server; nothing is sent if the server isn't a process of its own.
        """
        if key is not None:
            with suppress(OSError):
                self._channel.send(msgspec.json.encode(SignalRequest(key, number, group)))

    def _read(self) -> None:
        with suppress(OSError):
            while True:
                data = self._channel.recv(LONGEST_REQUEST)
                if not data:
                    break
                match _answer_decoder.decode(data):
                    case ChildForked(key, pid):
                        self._children[key].pid = pid
                    case ChildExited(key, code, peak_bytes):
                        self._children.pop(key).finish(code, peak_bytes)
                    case BuildShared(obstacle):
                        self._note_build(obstacle)
        for child in filter(lambda each: each.pid, self._children.values()):
            child.finish(-signal.SIGKILL)  # the kernel has killed it
        code = self._wait()
        for child in filter(lambda each: not each.pid, tuple(self._children.values())):
            child.finish(code)
        self._release()

    @abstractmethod
    def _note_build(self, obstacle: str) -> None:
        """Record whether a probe process has left a copy of itself with its built workload.

        `obstacle` is the reason if it hasn't, else "".
        """

    @abstractmethod
    def _release(self) -> None:
        """Close this side's files and sockets, after the server has exited."""


class BuiltServer(ChildServer):
    """Connection to a copy of a probe process that holds the user's built workload.

    The copy forks further probe processes. `far_end` is the file descriptor of the copy's end of
    the connection. It is passed to the process that creates the copy.
    """

    def __init__(self) -> None:
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(channel)
        self.far_end = theirs.detach()
        self.obstacle = ""  # why the child couldn't be forked with its workload
        self._serves = False
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the copy exists and accepts requests."""
        return self._serves

    def read_log(self) -> bytes:
        """Return nothing, because the copy has no log of its own.

        It writes to the streams of the processes that it forks.
        """
        return b""

    def close(self) -> None:
        """Close the connection; the copy then kills its processes and exits."""
        self._serves = False
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _wait(self) -> int:
        return -signal.SIGKILL

    def _note_build(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self._serves = not obstacle

    def _release(self) -> None:
        self._serves = False
        self._channel.close()


class ServerProcess(ChildServer):
    """Fork server that runs in its own process and has imported the modules in `imports`.

    Create it in a thread that lives as long as the server is needed: the kernel kills the server
    when that thread exits. Raises OSError if it can't be started.
    """

    def __init__(self, variables: Mapping[str, str], imports: Sequence[str]) -> None:
        self._last_words: bytes | None = None  # the end of its output, once it has exited
        with ExitStack() as stack:
            self._log = os.memfd_create("log of a fork server")
            stack.callback(os.close, self._log)
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(channel.close)
            with theirs:
                self._process = _run(theirs.fileno(), self._log, variables, imports)
            self._resources = stack.pop_all()  # closed once everything has been read
        super().__init__(channel)
        self.pid = self._process.pid
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the server is running."""
        return self._process.poll() is None

    def send_signal(self, key: int | None, number: int, group: bool = False) -> None:
        """Send a signal to the process with this key, or to its whole process group.

        None as the key means the server itself.
        """
        if key is None:
            self._process.send_signal(number)
        else:
            super().send_signal(key, number, group)

    def read_log(self) -> bytes:
        """Return the last LOG_BYTES of the server's output, also after its exit."""
        if self._last_words is None:
            with suppress(OSError):
                return os.pread(
                    self._log, LOG_BYTES, max(0, os.fstat(self._log).st_size - LOG_BYTES)
                )
        return self._last_words or b""

    def close(self) -> None:
        """Kill the server, and wait for its exit."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS)

    def _note_build(self, obstacle: str) -> None:
        raise ValueError("a child answers on its own channel")

    def _wait(self) -> int:
        code = self._process.wait()
        self._last_words = self.read_log()
        return code

    def _release(self) -> None:
        self._resources.close()


def _run(
    channel: int, log: int, variables: Mapping[str, str], imports: Sequence[str]
) -> subprocess.Popen[bytes]:
    # the signal is also blocked in the server, until the server can handle it
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(channel), *imports],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_merge_variables(variables),
            pass_fds=[channel],
            start_new_session=True,  # Ctrl-C on a terminal reaches only the parent, which decides
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _merge_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for the process of a fork server.

    They are those of this process, updated by `variables`.
    """
    merged = {**os.environ, **variables}
    # the server imports the same evener as this process
    merged["PYTHONPATH"] = import_path(merged.get("PYTHONPATH", ""))
    merged["PYTHONUNBUFFERED"] = "1"
    return merged
