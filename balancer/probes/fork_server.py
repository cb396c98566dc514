"""The process that children are forked from: it imports what they need once, so that each of them starts at once.

It reads requests from a socket, a datagram each, and answers there; it never imports the user's own code. It ends when
the other end of its socket closes, and its children with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import msgspec

from evener.devices.registry import all_backends

from . import stack_dump

LONGEST_REQUEST = 1 << 20  # bytes: the variables of a child
_PR_SET_PDEATHSIG = 1


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
answer_decoder: msgspec.json.Decoder[Importing | Forked | Ended] = msgspec.json.Decoder(Importing | Forked | Ended)


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
        signal.signal(stack_dump.SIGNAL, signal.SIG_IGN)  # until the program that starts now can answer it
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
