"""Children forked from a process that has imported their framework, as the process that asks for them sees them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import msgspec

from evener.devices.child_environment import import_path

from .fork_server import LONGEST_REQUEST, Ended, Forked, Importing, Signal, Start, answer_decoder

MODULE = "evener.balancer.probes.worker"
WAIT_SECONDS = 2.0
LOG_BYTES = 64 << 10  # how much of the end of a server's output is kept


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
        with ExitStack() as stack:
            self._log = os.memfd_create("log of a fork server")
            stack.callback(os.close, self._log)
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self._channel.close)
            with theirs:
                self._process = _run(theirs.fileno(), self._log, variables, imports)
            self._resources = stack.pop_all()  # closed once all has been read
        self.pid = self._process.pid
        threading.Thread(target=self._read, name=f"fork server {self.pid}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """True if the server still runs."""
        return self._process.poll() is None

    def start(self, variables: Mapping[str, str]) -> ForkedProcess:
        """A child that will be forked once everything is imported; OSError if the server has ended."""
        child = ForkedProcess(self, next(self._keys))
        self._children[child._key] = child
        request = msgspec.json.encode(Start(child._key, dict(variables)))
        stdin, stdout, _ = child.theirs
        try:
            socket.send_fds(self._channel, [request], child.theirs)
        except OSError:
            child.close()
            raise
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
                match answer_decoder.decode(data):
                    case Importing():
                        self._has_begun = True
                    case Forked(key, pid):
                        self._has_forked = True
                        self._children[key].begin(pid)
                    case Ended(key, code):
                        self._children.pop(key).finish(code)
        code, log = self._process.wait(), self.read_log()
        for child in tuple(self._children.values()):
            child.finish(-signal.SIGKILL if child.pid else code, log)
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
