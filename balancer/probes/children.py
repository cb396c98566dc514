"""Runs the probe processes of one layout as a group.

The group sends commands to the processes, collects their replies, and kills them in the end. There
is one process per device, or one process for several GPUs.

Two threads per process read its standard output and standard error, so that no amount of output
blocks the process or fills this one's memory. If a process fails, the others get `GRACE_SECONDS` to
report their own failures. Then the root cause is chosen from all failures.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import msgspec

from evener.devices.backend import ChildEnvironment

from .failures import GroupError, RankFailure, StoppedError, error_failure, exit_failure, one_line
from .fork_server import WAIT_SECONDS, ChildServer
from .launch_plan import RankMap
from .protocol import (
    LONGEST_LINE_BYTES,
    STACK_SIGNAL,
    Built,
    ChildError,
    Command,
    Exited,
    HostLost,
    InvalidReply,
    MemoryReleased,
    Message,
    Prepared,
    Ready,
    ReleaseMemory,
    Reply,
    Stack,
    encode_line,
    parse_reply,
    read_stack,
)

STDERR_BYTES = 64 << 10  # bytes at the end of standard error that are kept
# seconds to read the rest of standard error, which processes that the child started may keep open
DRAIN_SECONDS = 0.2
STACK_SECONDS, POLL_SECONDS = 2.0, 0.01  # timeout and interval for the answer to a signal
_READ_BYTES = 64 << 10
TICK_SECONDS = 0.05
GRACE_SECONDS = 1.0  # seconds for the other ranks to report too, once one has failed
# the same if that rank has recovered: the others finish the step and continue
RECOVERED_SECONDS = 20.0


Inbox = queue.Queue[tuple[int, Message]]


class RunningChild(ABC):
    """Base class of a probe process on this or another host.

    Its replies go into an inbox, which it shares with the other processes of its layout.
    """

    rank: int
    alive: bool  # False once it has exited

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command; this has no effect if the process has exited."""

    @abstractmethod
    def find_stack(self) -> Stack | None:
        """Return the stack of the process's main thread, or None if it doesn't answer."""

    def find_loss(self) -> str:
        """Return why the host of the process can't be reached any more, or "" if it can."""
        return ""

    @abstractmethod
    def end(self) -> None:
        """Kill the process and its descendants."""


class Child(RunningChild):
    """A probe process on this host, forked by the fork server."""

    def __init__(
        self,
        rank: int,
        inbox: Inbox,
        server: ChildServer,
        environment: ChildEnvironment,
        cap_bytes: int | None,
        build_channel: int | None = None,
    ) -> None:
        """Ask the fork server to start the process.

        Raises OSError if the request can't be sent.

        - `cap_bytes`: the process's memory limit, used to recognize exits for lack of memory.
        - `build_channel`: a file descriptor to pass to the process; None for none. Once the process
          has built the user's workload, it may fork a copy of itself. The copy receives requests on
          this descriptor, and forks later probe processes that have the workload in memory.
        """
        self.rank, self.alive = rank, True
        self.pid = 0  # 0 until the child runs
        self._server, self._inbox, self._cap_bytes = server, inbox, cap_bytes
        self._stderr = b""
        self._kills_before = _kernel_kills()
        self._exit = Exited(0)  # set once it has exited
        self._ended = threading.Event()
        (stdin, write), (read, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
        own = self._stdin, replies, output = (
            os.fdopen(write, "wb"),
            os.fdopen(read, "rb"),
            os.fdopen(errors, "rb"),
        )
        try:
            streams = [stdin, stdout, stderr]
            if build_channel is not None:
                streams.append(build_channel)
            self._key = server.start(self, environment, streams)
        except OSError:
            for stream in own:
                stream.close()
            raise
        self._stderr_reader = self._start_thread(self._read_stderr, output)
        self._start_thread(self._read_replies, replies)

    def _start_thread(self, read: Callable[[BinaryIO], None], stream: BinaryIO) -> threading.Thread:
        thread = threading.Thread(
            target=read, args=(stream,), name=f"child of rank {self.rank}", daemon=True
        )
        thread.start()
        return thread

    def finish(self, code: int, peak_bytes: int = 0) -> None:
        """Record the exit code and peak memory; called by the fork server after the exit."""
        self.alive = False
        self._exit = Exited(code, peak_bytes / self._cap_bytes if self._cap_bytes else 0.0)
        self._ended.set()

    def send(self, command: Command) -> None:
        """Send a command.

        Errors are ignored, because the exit of the process is reported in the inbox.
        """
        with suppress(OSError, ValueError):
            self._stdin.write(encode_line(command))
            self._stdin.flush()

    @property
    def stderr_tail(self) -> str:
        """End of the process's standard error.

        Before the process has started, this includes the end of the fork server's output.
        """
        written = self._stderr + (b"" if self.pid else self._server.read_log())
        return written.decode(errors="replace")

    def find_stack(self) -> Stack | None:
        """Return the stack of the process's main thread, or None if it doesn't answer in time.

        The process has STACK_SECONDS to answer. If it hasn't been forked yet, the fork server's
        stack is returned.
        """
        self._server.send_signal(self._key if self.pid else None, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_SECONDS
        while (
            (stack := read_stack(self.stderr_tail)) is None
            and self.alive
            and time.monotonic() < deadline
        ):
            time.sleep(POLL_SECONDS)
        return stack

    def end(self) -> None:
        """Kill the process and its process group, and wait for its exit."""
        self._server.send_signal(self._key, signal.SIGKILL, group=True)
        if self.pid:
            self._ended.wait(WAIT_SECONDS)
        with suppress(OSError):
            self._stdin.close()

    def _read_replies(self, stream: BinaryIO) -> None:
        rest = b""
        while part := _read(stream):
            *lines, rest = (rest + part).split(b"\n")
            for text in lines:
                self._put_message(parse_reply(text))
            if len(rest) > LONGEST_LINE_BYTES:
                self._put_message(InvalidReply("a line without an end"))
                rest = b""
        stream.close()
        has_ended = self._ended.wait(WAIT_SECONDS)
        self._stderr_reader.join(DRAIN_SECONDS)
        killed = _kernel_kills() > self._kills_before
        end = msgspec.structs.replace(self._exit, kernel_killed=killed, output=self.stderr_tail)
        self._put_message(end if has_ended else InvalidReply("it closed its output"))

    def _read_stderr(self, stream: BinaryIO) -> None:
        while part := _read(stream):
            self._stderr = (self._stderr + part)[-STDERR_BYTES:]
        stream.close()

    def _put_message(self, message: Message) -> None:
        """Put a message into the inbox of the group; it is lost if the inbox stays full."""
        with suppress(queue.Full):
            self._inbox.put((self.rank, message), timeout=WAIT_SECONDS)


def _read(stream: BinaryIO) -> bytes:
    try:
        return os.read(stream.fileno(), _READ_BYTES)
    except (OSError, ValueError):
        return b""


def _kernel_kills() -> int:
    """Return how many processes Linux has killed for lack of memory since boot.

    Returns 0 if it is unknown.
    """
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


class ChildGroup:
    """The probe processes that run one layout, one for each rank."""

    def __init__(self, children: Sequence[RunningChild], inbox: Inbox, ranks: RankMap) -> None:
        self.children, self.ranks = list(children), ranks
        self.fresh = True  # it hasn't measured anything yet
        self.link_speed = 0.0  # bytes per second of an all-reduce between its ranks; 0: unknown
        self.link_path = ""  # path between the ranks' devices, such as NVLink; empty: unknown
        # seconds that its children waited for the imports of the fork server
        self.import_seconds = 0.0
        self.held_bytes: dict[int, int] = {}  # position -> bytes that it holds while it is idle
        self._inbox = inbox

    def call(
        self,
        command: Callable[[int], Command],
        expected: type[Reply],
        seconds: float,
        stop: threading.Event,
    ) -> list[Reply]:
        """Send a command to each rank, and return their replies in the order of ranks.

        `command` is called with each rank, and returns the command for it. `expected` is the type
        of the replies. Raises GroupError if a rank fails or doesn't reply within `seconds`, and
        StoppedError once `stop` is set.
        """
        for child in self.children:
            child.send(command(child.rank))
        return self.receive(expected, seconds, stop)

    def receive(self, expected: type[Reply], seconds: float, stop: threading.Event) -> list[Reply]:
        """Wait for a reply from each rank, and return the replies in the order of ranks.

        Raises GroupError if a rank fails or doesn't reply within `seconds`, and StoppedError once
        `stop` is set.
        """
        # once a rank has failed, the others get `GRACE_SECONDS` to reply, or `RECOVERED_SECONDS` if
        # the failed rank can continue; a rank that is still silent then doesn't count as failed,
        # unless its host was lost
        replies, failures = self._collect_replies(expected, seconds, stop)
        silent = [rank for rank in range(len(self.children)) if rank not in {**replies, **failures}]
        if failures:
            failures |= self._find_losses(silent)
        else:
            failures = {rank: self._silence(rank, seconds) for rank in silent}
        if failures:
            silent = [rank for rank in silent if rank not in failures]
            raise GroupError(*failures.values(), silent=silent)
        return [replies[rank] for rank in range(len(self.children))]

    def _collect_replies(
        self, expected: type[Reply], seconds: float, stop: threading.Event
    ) -> tuple[dict[int, Reply], dict[int, RankFailure]]:
        """Wait for all ranks, and return their replies and their failures, both by rank.

        A rank that hasn't answered in time is in neither of them.
        """
        replies: dict[int, Reply] = {}
        failures: dict[int, RankFailure] = {}
        deadline = time.monotonic() + seconds
        while len(replies) + len(failures) < len(self.children) and time.monotonic() <= deadline:
            if stop.is_set():
                self._stop_waiting(expected, replies)
            try:
                rank, message = self._inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(message, expected) and rank not in replies:
                replies[rank] = message
            elif rank not in failures:
                replies.pop(rank, None)
                failures[rank] = self._failure(rank, message)
                # the other ranks have less time once one has failed
                grace = RECOVERED_SECONDS if failures[rank].recovered else GRACE_SECONDS
                deadline = min(deadline, time.monotonic() + grace)
        return replies, failures

    def _stop_waiting(self, expected: type[Reply], replies: Mapping[int, Reply]) -> NoReturn:
        """Raise StoppedError, because the probe was stopped while replies were missing.

        If the user's code may be running, the error has the stack of the first rank without a
        reply.
        """
        late = [child for child in self.children if child.rank not in replies]
        # the user's code runs while children start, build or prepare
        in_users_code = expected in (Ready, Built, Prepared)
        raise StoppedError(late[0].find_stack() if in_users_code else None)

    def _find_losses(self, silent: Sequence[int]) -> dict[int, RankFailure]:
        """Return a failure for each silent rank whose host can't be reached any more, by rank."""
        found = {}
        for rank in silent:
            loss = self.children[rank].find_loss()
            if loss:
                found[rank] = RankFailure(rank, "device", loss)
        return found

    def release_memory(self, seconds: float, stop: threading.Event) -> dict[int, int]:
        """Tell all ranks to release their cached memory.

        Returns the bytes that are still held on each device, by position; devices for which this is
        unknown are left out. Raises GroupError if a rank fails or doesn't reply within `seconds`,
        and StoppedError once `stop` is set.
        """
        replies = self.call(lambda _: ReleaseMemory(), MemoryReleased, seconds, stop)
        sizes = [size for reply in replies for size in cast(MemoryReleased, reply).memory_bytes]
        kept: defaultdict[int, int] = defaultdict(int)
        for position, size in zip(self.ranks.positions, sizes, strict=False):
            if size is not None:
                kept[position] += size
        return dict(kept)

    @property
    def alive(self) -> bool:
        """Whether all processes are still running."""
        return all(child.alive for child in self.children)

    def end(self) -> None:
        """Kill all processes."""
        for child in self.children:
            child.end()

    def _silence(self, rank: int, seconds: float) -> RankFailure:
        stack = self.children[rank].find_stack()
        at, text = (
            (f", at {stack.where}" if stack.where else "", stack.text)
            if stack is not None
            else ("", "")
        )
        return RankFailure(rank, "timeout", f"no answer within {seconds:.0f} s{at}", output=text)

    def _failure(self, rank: int, message: Message) -> RankFailure:
        match message:
            case ChildError():
                return error_failure(rank, message)
            case Exited():
                return exit_failure(rank, message)
            case HostLost():
                return RankFailure(rank, "device", message.text)
            case InvalidReply():
                text = one_line(message.text, 80)
                return RankFailure(
                    rank, "protocol", f"it sent something that is not a reply: {text!r}"
                )
            case _:
                return RankFailure(
                    rank, "protocol", f"it sent {type(message).__name__} when it was not asked for"
                )
