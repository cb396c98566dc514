"""One child process: started, written to, read from and ended.

Threads of this process drain the child's two pipes, so no amount of output can block it or fill this process' memory.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import psutil

from . import protocol
from .forked_process import WAIT_SECONDS, ForkedProcess
from .protocol import Begin, Command, Reply
from .stack_dump import SIGNAL, Stack, read_stack

STDERR_BYTES = 64 << 10  # how much of the end of standard error is kept
DRAIN_SECONDS = 0.2  # for the rest of standard error, which what it started may keep open
STACK_SECONDS, POLL_SECONDS = 2.0, 0.01  # for the answer to a signal
_READ_BYTES = 64 << 10


class Exited(msgspec.Struct, frozen=True):
    """The child ended; `code` is negative for a signal."""

    code: int
    cap_share: float = 0.0  # the largest sampled memory as a part of its cap; 0 without a cap
    kernel_killed: bool = False  # the kernel has killed some process for memory since the child started
    output: str = ""  # the end of what it wrote to standard error and standard output


class InvalidReply(msgspec.Struct, frozen=True):
    """The child sent something that is not a reply."""

    text: str


class HostLost(msgspec.Struct, frozen=True):
    """The child's host has gone, and the child with it."""

    text: str


Message = Reply | Exited | InvalidReply | HostLost
Inbox = queue.Queue[tuple[int, Message]]


class RunningChild(Protocol):
    """A child on any host, as a group uses it; `Child` says what its members are."""

    rank: int

    def send(self, command: Command) -> None: ...

    def sample_memory(self) -> None: ...

    @property
    def alive(self) -> bool: ...

    def find_stack(self) -> Stack | None: ...

    def find_loss(self) -> str: ...

    def end(self) -> None: ...


class Child:
    """A running worker. Its messages go to `inbox` with its rank; it is killed with its whole process group."""

    def __init__(
        self, rank: int, inbox: Inbox, process: ForkedProcess, cores: tuple[int, ...], cap_bytes: int | None
    ) -> None:
        self.rank = rank
        self._cap_bytes = cap_bytes
        self._inbox = inbox
        self._stderr: deque[bytes] = deque()
        self._stderr_bytes = 0
        self._peak_bytes = 0
        self._kills_before = _kernel_kills()
        self._process = process
        self._stderr_reader = self._start_thread(self._read_stderr, process.stderr)
        self._start_thread(self._read_replies, process.stdout)
        self.send(Begin(cores))

    def _start_thread(self, read: Callable[[BinaryIO], None], stream: BinaryIO) -> threading.Thread:
        thread = threading.Thread(target=read, args=(stream,), name=f"child of rank {self.rank}", daemon=True)
        thread.start()
        return thread

    def send(self, command: Command) -> None:
        """Send a command; if the child is gone, the inbox says so."""
        with suppress(OSError, ValueError):
            self._process.stdin.write(protocol.encode_line(command))
            self._process.stdin.flush()

    def sample_memory(self) -> None:
        """Remember how much memory it holds, in case it ends without a message."""
        with suppress(psutil.Error):
            if self.pid:
                self._peak_bytes = max(self._peak_bytes, psutil.Process(self.pid).memory_info().rss)

    @property
    def pid(self) -> int:
        """The process id of the child; 0 until it runs."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until the child has ended."""
        return self._process.returncode is None

    @property
    def stderr_tail(self) -> str:
        """The end of what it wrote to standard error and standard output."""
        return b"".join(self._stderr).decode(errors="replace") + self._process.read_log()

    def find_stack(self) -> Stack | None:
        """The stack of the child as it is now, once it has said that it is ready; None if it doesn't answer."""
        self._process.send_signal(SIGNAL)
        deadline = time.monotonic() + STACK_SECONDS
        while (stack := read_stack(self.stderr_tail)) is None and self.alive and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return stack

    def find_loss(self) -> str:
        """The reason why the child's host doesn't answer; empty, as this machine does."""
        return ""

    def end(self) -> None:
        """Kill the child and its process group now; safe to call twice."""
        self._process.kill()
        if self.pid:
            self._process.wait(WAIT_SECONDS)
        with suppress(OSError):
            self._process.stdin.close()

    def _read_replies(self, stream: BinaryIO) -> None:
        rest = b""
        while part := _read(stream):
            *lines, rest = (rest + part).split(b"\n")
            for text in lines:
                self._put(parse_reply(text))
            if len(rest) > protocol.LONGEST_LINE_BYTES:
                self._put(InvalidReply("a line without an end"))
                rest = b""
        self._process.wait(WAIT_SECONDS)
        code = self._process.returncode
        self._put(InvalidReply("it closed its output") if code is None else self._describe_exit(code))
        stream.close()

    def _describe_exit(self, code: int) -> Exited:
        self._stderr_reader.join(DRAIN_SECONDS)
        share = self._peak_bytes / self._cap_bytes if self._cap_bytes else 0.0
        return Exited(code, share, _kernel_kills() > self._kills_before, self.stderr_tail)

    def _read_stderr(self, stream: BinaryIO) -> None:
        while part := _read(stream):
            self._stderr.append(part)
            self._stderr_bytes += len(part)
            while self._stderr_bytes - len(self._stderr[0]) >= STDERR_BYTES:
                self._stderr_bytes -= len(self._stderr.popleft())
        stream.close()

    def _put(self, message: Message) -> None:
        """Into the inbox; what a child sends beyond its capacity is dropped."""
        with suppress(queue.Full):
            self._inbox.put((self.rank, message), timeout=WAIT_SECONDS)


def parse_reply(text: bytes) -> Reply | InvalidReply:
    """The reply in a line, or InvalidReply with how the line begins."""
    try:
        return protocol.reply_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return InvalidReply(text[:80].decode(errors="replace"))


def _read(stream: BinaryIO) -> bytes:
    try:
        return os.read(stream.fileno(), _READ_BYTES)
    except (OSError, ValueError):
        return b""


def _kernel_kills() -> int:
    """The number of processes that the kernel has killed for memory since boot; 0 if it does not say."""
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
