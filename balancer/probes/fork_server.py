"""The process that children are forked from: it imports what they need once, so that each of them starts at once.

`ForkServer` runs there: it reads requests from a socket, a datagram each, and answers; it never imports the user's own
code. It ends when the other end of its socket closes, and its children with it. `ServerProcess` is the other end.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path

import msgspec

from evener.devices.registry import all_backends, import_path

from .protocol import STACK_SIGNAL

LONGEST_REQUEST = 1 << 20  # bytes: the variables of a child
_PR_SET_PDEATHSIG = 1
MODULE = "evener.balancer.probes.worker"
WAIT_SECONDS = 2.0
LOG_BYTES = 64 << 10  # how much of the end of a server's output is kept


class Start(msgspec.Struct, frozen=True, tag=True):
    """Fork a child with these variables; its standard input, output and error come with the message."""

    key: int  # by which both sides know it
    variables: dict[str, str]


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a child, or its whole process group, a signal, if it still runs."""

    key: int
    number: int
    group: bool = False


class Importing(msgspec.Struct, frozen=True, tag=True):
    """The server imports from now on; a signal for its stack doesn't end it any more."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A child runs."""

    key: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A child has ended; `code` is negative for a signal."""

    key: int
    code: int


_decoder: msgspec.json.Decoder[Start | Signal] = msgspec.json.Decoder(Start | Signal)
_answer_decoder: msgspec.json.Decoder[Importing | Forked | Ended] = msgspec.json.Decoder(Importing | Forked | Ended)


class ForkServer:
    """Forks children that run `run`, which gets this process' pid, and says how they end."""

    def __init__(self, channel: socket.socket, run: Callable[[int], object]) -> None:
        self._channel, self._run = channel, run
        self._pids: dict[int, int] = {}  # key -> pid of a child that isn't reaped
        self._keys: dict[int, int] = {}  # its pidfd -> key

    def serve(self) -> None:
        """Carry out requests until the socket closes; children that run then are killed."""
        while True:
            channel = self._channel.fileno()
            ready, _, _ = select.select([channel, *self._keys], [], [])
            for descriptor in ready:
                if descriptor != channel:
                    self._reap(descriptor)
            if channel in ready and not self._carry_out():
                break
        for key in self._pids:
            self._send_signal(Signal(key, signal.SIGKILL, True))

    def _carry_out(self) -> bool:
        """The next request; False if there is none any more."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, LONGEST_REQUEST, 3)
        if not data:
            return False
        match _decoder.decode(data):
            case Start() as start:
                self._fork(start, descriptors)
            case Signal() as request:
                self._send_signal(request)
        return True

    def _fork(self, start: Start, streams: Sequence[int]) -> None:
        own = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(streams[2], f"fork: {error}".encode())
            self._answer(Ended(start.key, 1))
        else:
            if not pid:
                self._be_child(start, streams, own)
            self._pids[start.key] = pid
            self._keys[os.pidfd_open(pid)] = start.key
            self._answer(Forked(start.key, pid))
        finally:
            for descriptor in streams:
                os.close(descriptor)

    def _be_child(self, start: Start, streams: Sequence[int], parent: int) -> None:
        """Never returns."""
        try:
            os.setsid()  # its process group is its own
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            for descriptor in (self._channel.fileno(), *streams, *self._keys):
                os.close(descriptor)
            os.environ.update(start.variables)
            self._run(parent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self, descriptor: int) -> None:
        key = self._keys.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(self._pids.pop(key), 0)
        self._answer(Ended(key, os.waitstatus_to_exitcode(status)))

    def _send_signal(self, request: Signal) -> None:
        pid = self._pids.get(request.key)
        if pid is None:
            return
        try:
            (os.killpg if request.group else os.kill)(pid, request.number)
        except ProcessLookupError:  # it has no group of its own yet
            os.kill(pid, request.number)

    def _answer(self, answer: Forked | Ended) -> None:
        with suppress(OSError):
            self._channel.send(msgspec.json.encode(answer))


def import_first(names: Sequence[str]) -> None:
    """Import "module" or "module:attribute"; start without if that fails, or starts a driver: it can't be forked."""
    try:
        for name in names:
            module, _, attribute = name.partition(":")
            getattr(import_module(module), attribute or "__name__")
        forkable = not _has_started_driver()
    except Exception:
        forkable = False  # a child imports it again, and reports the error
    if names and not forkable:
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # until the program that starts now can answer it
        os.execv(sys.executable, sys.orig_argv[: -len(names)])
    gc.freeze()  # all children share these objects: their collections need not visit, and so copy, them


def _has_started_driver() -> bool:
    """True if a device's driver runs in this process, which then can't be forked."""
    names = [name for backend in all_backends() for name in backend.driver_files]
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            path = os.readlink(entry)
            if any(name in path for name in names):
                return True
    return False


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class ForkedProcess:
    """A child: its pipes, and how it ended."""

    def __init__(self, server: ServerProcess, key: int) -> None:
        self._server, self._key = server, key
        self._ended = threading.Event()
        self.pid = 0  # until it runs
        self.returncode: int | None = None  # negative for a signal
        (stdin, write), (read, stdout), (errors, self._stderr) = (os.pipe() for _ in range(3))
        self.stdin, self.stdout, self.stderr = os.fdopen(write, "wb"), os.fdopen(read, "rb"), os.fdopen(errors, "rb")
        self.theirs = stdin, stdout, self._stderr

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, for at most `seconds`."""
        self._ended.wait(seconds)

    def send_signal(self, number: int) -> None:
        """Send the process a signal; before it runs, the server that still imports gets the signal."""
        self._server.send_signal(self._key if self.pid else None, number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        self._server.send_signal(self._key, signal.SIGKILL, group=True)

    def read_log(self) -> str:
        """The output of the fork server while the process waits for the server's imports; empty after that."""
        waits = not self.pid and self.returncode is None
        return self._server.read_log().decode(errors="replace") if waits else ""

    def begin(self, pid: int) -> None:
        """Record that the process runs, as its server says, and close this side's copy of its stderr."""
        self.pid = pid
        self._close_stderr()

    def finish(self, code: int, output: bytes = b"") -> None:
        """Record that the process has ended; `output` is what its server wrote before it could be started."""
        if self._stderr >= 0 and output:
            os.set_blocking(self._stderr, False)
            with suppress(OSError):
                os.write(self._stderr, output)
        self._close_stderr()
        self.returncode = code
        self._ended.set()

    def close(self) -> None:
        """Close the pipes of the process when nobody will read them."""
        self._close_stderr()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()

    def _close_stderr(self) -> None:
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1


class ServerProcess:
    """A running fork server; OSError if it can't be started. Ends with the thread that made it, or by `close`."""

    def __init__(self, variables: Mapping[str, str], imports: Sequence[str]) -> None:
        self._keys = itertools.count()
        self._children: dict[int, ForkedProcess] = {}
        self._has_begun = False  # to import
        self._has_forked = False
        self._last_words = b""  # the end of its output, once it has ended
        with ExitStack() as stack:
            self._log = os.memfd_create("log of a fork server")
            stack.callback(os.close, self._log)
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self._channel.close)
            with theirs:
                self._process = _run(theirs.fileno(), self._log, variables, imports)
            self._resources = stack.pop_all()  # closed once all has been read
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"fork server {self.pid}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """True if the server still runs."""
        return self._process.poll() is None

    def start(self, variables: Mapping[str, str]) -> ForkedProcess:
        """A child that will be forked once everything is imported; one that has ended as the server did, if it has.

        OSError if the request can't be sent.
        """
        child = ForkedProcess(self, next(self._keys))
        self._children[child._key] = child
        request = msgspec.json.encode(Start(child._key, dict(variables)))
        stdin, stdout, _ = child.theirs
        try:
            socket.send_fds(self._channel, [request], child.theirs)
        except OSError:
            self._reader.join(WAIT_SECONDS)
            if self._reader.is_alive():
                child.close()
                raise
            if child.returncode is None:
                child.finish(self._process.wait(), self._last_words)
        finally:
            os.close(stdin)
            os.close(stdout)
        return child

    def send_signal(self, key: int | None, number: int, group: bool = False) -> None:
        """Send a child a signal; without a key, the server itself, once it imports."""
        if key is None:
            if self._has_begun:
                self._process.send_signal(number)
        else:
            with suppress(OSError):
                self._channel.send(msgspec.json.encode(Signal(key, number, group)))

    def read_log(self) -> bytes:
        """The end of what it wrote."""
        with suppress(OSError):
            return os.pread(self._log, LOG_BYTES, max(0, os.fstat(self._log).st_size - LOG_BYTES))
        return b""

    def close(self) -> None:
        """End the server and all of its children that still run; safe to call twice."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        if self._has_forked:  # it doesn't import now, and so notices at once
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(WAIT_SECONDS)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS)

    def _read(self) -> None:
        with suppress(OSError):
            while data := self._channel.recv(LONGEST_REQUEST):
                match _answer_decoder.decode(data):
                    case Importing():
                        self._has_begun = True
                    case Forked(key, pid):
                        self._has_forked = True
                        self._children[key].begin(pid)
                    case Ended(key, code):
                        self._children.pop(key).finish(code)
        code, self._last_words = self._process.wait(), self.read_log()
        for child in tuple(self._children.values()):
            child.finish(-signal.SIGKILL if child.pid else code, self._last_words)
        self._resources.close()


def _run(channel: int, log: int, variables: Mapping[str, str], imports: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(channel), *imports],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=_merge_variables(variables),
        pass_fds=[channel],
        start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone, which decides
    )


def _merge_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """This process' environment with `variables` over it; the server imports the evener that runs here."""
    merged = {**os.environ, **variables}
    merged["PYTHONPATH"] = import_path(merged.get("PYTHONPATH", ""))
    merged["PYTHONUNBUFFERED"] = "1"
    return merged
