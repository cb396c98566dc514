"""One child process: how it is started, spoken to, watched and ended. Everything it says is bounded.

Threads of this process drain its two pipes, so that no amount of output can stop it or fill this process' memory.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import IO

import msgspec

from evener.balancer.probes import protocol
from evener.balancer.probes.procfs import kernel_kills, resident_bytes, start_time
from evener.balancer.probes.protocol import Begin, Order, Reply
from evener.devices.child_environment import ChildEnvironment, import_path

CHATTER_BYTES = 64 << 10  # kept of standard error
WAIT_SECONDS = 2.0
_READ_BYTES = 64 << 10


class Gone(msgspec.Struct, frozen=True):
    """The child ended; `code` is negative for a signal."""

    code: int


class Nonsense(msgspec.Struct, frozen=True):
    """The child said something that is no reply."""

    text: str


Said = Reply | Gone | Nonsense
Inbox = queue.Queue[tuple[int, Said]]


class Child:
    """A started worker. What it says goes to `inbox` with its rank; it is killed with its whole process group."""

    def __init__(self, rank: int, inbox: Inbox, surroundings: ChildEnvironment, cap_bytes: int | None) -> None:
        self.rank = rank
        self._cap_bytes = cap_bytes
        self._inbox = inbox
        self._chatter: deque[bytes] = deque()
        self._chatter_bytes = 0
        self._highest_bytes = 0
        self._kills_before = kernel_kills()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "evener.balancer.probes.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(surroundings.variables),
            start_new_session=True,  # a terminal's Ctrl-C is for the parent to decide on
        )
        self.pid = self._process.pid
        for read, stream in ((self._read_replies, self._process.stdout), (self._read_chatter, self._process.stderr)):
            threading.Thread(target=read, args=(stream,), name=f"child {self.pid}", daemon=True).start()
        self.send(Begin(os.getpid(), start_time(os.getpid()) or 0.0, surroundings.cores))

    def send(self, order: Order) -> None:
        """Give an order; a child that is gone says so through the inbox."""
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(protocol.line(order))
            self._process.stdin.flush()

    def look(self) -> None:
        """Remember how much memory it holds, for when it ends without a word."""
        self._highest_bytes = max(self._highest_bytes, resident_bytes(self.pid))

    @property
    def alive(self) -> bool:
        """Still running, as far as the kernel says."""
        return self._process.poll() is None

    @property
    def cap_share(self) -> float:
        """How much of its memory cap it held at most when looked at; 0 without a cap."""
        return self._highest_bytes / self._cap_bytes if self._cap_bytes else 0.0

    @property
    def kernel_killed(self) -> bool:
        """Whether the kernel has killed somebody for memory since this child began."""
        return kernel_kills() > self._kills_before

    @property
    def chatter(self) -> str:
        """The end of what it wrote to standard error and standard output."""
        return b"".join(self._chatter).decode(errors="replace")

    def end(self) -> None:
        """Kill it and its process group now; safe to call twice."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS)
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _read_replies(self, stream: IO[bytes]) -> None:
        rest = b""
        while True:
            part = _read(stream)
            if not part:
                break
            *lines, rest = (rest + part).split(b"\n")
            for text in lines:
                self._put(reply_of(text))
            if len(rest) > protocol.LONGEST_LINE_BYTES:
                self._put(Nonsense("a line without an end"))
                rest = b""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS)
        code = self._process.returncode
        self._put(Nonsense("it closed its output") if code is None else Gone(code))
        stream.close()

    def _read_chatter(self, stream: IO[bytes]) -> None:
        while part := _read(stream):
            self._chatter.append(part)
            self._chatter_bytes += len(part)
            while self._chatter_bytes - len(self._chatter[0]) >= CHATTER_BYTES:
                self._chatter_bytes -= len(self._chatter.popleft())
        stream.close()

    def _put(self, said: Said) -> None:
        """Into the inbox; a child that floods it is cut off, as nobody reads that much."""
        with suppress(queue.Full):
            self._inbox.put((self.rank, said), timeout=WAIT_SECONDS)


def _read(stream: IO[bytes]) -> bytes:
    try:
        return os.read(stream.fileno(), _READ_BYTES)
    except (OSError, ValueError):
        return b""


def reply_of(text: bytes) -> Said:
    """The reply that a line holds, or what it says instead."""
    try:
        return protocol.replies.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Nonsense(text[:80].decode(errors="replace"))


def _environment(variables: dict[str, str]) -> dict[str, str]:
    """This process' environment with `variables` over it; the child imports the evener that runs here."""
    merged = {**os.environ, **variables}
    merged["PYTHONPATH"] = import_path(merged.get("PYTHONPATH", ""))
    merged["PYTHONUNBUFFERED"] = "1"
    return merged
