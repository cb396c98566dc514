"""The children of one layout: they get their commands together, are waited for together, and end together.

A layout has one child on one device, one child over several GPUs, or a child per device that step as a group. When one
of them fails, the others get a moment to report too; the failure that caused the rest is then chosen by what they said.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from ..types import Cause
from . import exit_causes
from .child import Exited, HostLost, Inbox, InvalidReply, Message, RunningChild
from .protocol import Built, ChildError, Command, Prepared, Ready, Reply, Rest, Rested
from .stack_dump import Stack

TICK_SECONDS = 0.05
GRACE_SECONDS = 1.0  # for the others to say why they stopped, once one has failed
_CAUSE_ORDER: tuple[Cause, ...] = ("device", "raised", "signal", "exit", "protocol", "unsupported", "timeout")
_LOST_A_PEER = ("unavailable", "cancelled", "canceled", "connection reset", "connection closed", "has gone", "aborted")
_USER_ERRORS = ("UserCodeError", "RequestError", "SyntaxError")
_OWN_WORDS = ("UserCodeError", "RequestError", "EvenerError")  # their text says what kind of error it is


class StoppedError(Exception):
    """The session stops: what was running has no outcome. `stack`: where a child was that had not begun to measure."""

    def __init__(self, stack: Stack | None = None) -> None:
        super().__init__(stack)
        self.stack = stack


class RankFailure(msgspec.Struct, frozen=True):
    """The failure of one rank, with its cause."""

    rank: int
    cause: Cause
    detail: str  # one line
    out_of_memory: bool = False
    gpu: int | None = None  # the framework's number of the GPU that ran out of memory, if it named one
    output: str = ""  # the whole traceback, or the end of standard error
    user_code: bool = False  # the workload's own code or settings are wrong, whatever the device

    @property
    def lost_a_peer(self) -> bool:
        """True if the message is one of a rank that stopped because another rank did."""
        return self.cause == "raised" and any(sign in self.detail.lower() for sign in _LOST_A_PEER)


class GroupError(Exception):
    """The group can't go on; its children are not used again."""

    def __init__(self, *failures: RankFailure) -> None:
        super().__init__(failures)
        self.failures = failures

    @property
    def root(self) -> RankFailure:
        """The likely cause: out of memory before other failures, a rank that only lost a peer last."""
        return min(
            self.failures, key=lambda f: (not f.out_of_memory, f.lost_a_peer, _CAUSE_ORDER.index(f.cause), f.rank)
        )


class RankMap(msgspec.Struct, frozen=True):
    """The positions of a group's ranks among the devices of the request."""

    positions: tuple[int, ...]  # in rank order; of one child over several devices, in its own order of devices
    one_process: bool = False  # one child over all positions
    own_cores: bool = False  # CPU slices: a rank's own compute is known from its CPU time
    threads: int = 1  # of each rank
    busy_cores: tuple[float, ...] = ()  # cores that each rank's step keeps busy

    @property
    def unique_positions(self) -> tuple[int, ...]:
        """Each position once, in rank order."""
        return tuple(dict.fromkeys(self.positions))


class ChildGroup:
    """Children in rank order, with one inbox."""

    def __init__(self, children: Sequence[RunningChild], inbox: Inbox, ranks: RankMap) -> None:
        self.children, self.ranks = list(children), ranks
        self.fresh = True  # it has not measured anything yet
        self.import_seconds = 0.0  # that its children waited for the process that they are forked from
        self.held_bytes: dict[int, int] = {}  # position -> what it keeps there while it rests
        self._inbox = inbox

    def call(
        self, command: Callable[[int], Command], expected: type[Reply], seconds: float, stop: threading.Event
    ) -> list[Reply]:
        """Send every rank its command at once and wait for all replies."""
        for child in self.children:
            child.send(command(child.rank))
        return self.receive(expected, seconds, stop)

    def receive(self, expected: type[Reply], seconds: float, stop: threading.Event) -> list[Reply]:
        """One reply of the expected type from every rank, in rank order; GroupError if they don't come in `seconds`.

        A rank that is silent when another fails is no failure of its own: it only was not waited for.
        """
        deadline = time.monotonic() + seconds
        replies: dict[int, Reply] = {}
        failures: dict[int, RankFailure] = {}
        while len(replies) + len(failures) < len(self.children) and time.monotonic() <= deadline:
            if stop.is_set():
                late = [child for child in self.children if child.rank not in replies]
                raise StoppedError(late[0].find_stack() if expected in (Ready, Built, Prepared) else None)
            received = self._next_message()
            if received is None:
                continue
            rank, message = received
            if isinstance(message, expected) and rank not in replies:
                replies[rank] = message
            elif rank not in failures:
                replies.pop(rank, None)
                failures[rank] = self._failure(rank, message)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        ranks = range(len(self.children))
        for rank in ranks if failures else ():  # the others may have failed because its host has gone
            if rank not in replies and rank not in failures and (loss := self.children[rank].find_loss()):
                failures[rank] = RankFailure(rank, "device", loss)
        if not failures:
            failures = {rank: self._silence(rank, seconds) for rank in ranks if rank not in replies}
        if failures:
            raise GroupError(*failures.values())
        return [replies[rank] for rank in ranks]

    def rest(self, seconds: float, stop: threading.Event) -> dict[int, int]:
        """Let every rank give back memory that isn't in use: position -> the bytes that are kept, where that is known.

        It may take `seconds`; GroupError and StoppedError as in `receive`.
        """
        replies = self.call(lambda _: Rest(), Rested, seconds, stop)
        sizes = [size for reply in replies for size in cast(Rested, reply).memory_bytes]
        kept: defaultdict[int, int] = defaultdict(int)
        for position, size in zip(self.ranks.positions, sizes, strict=False):
            if size is not None:
                kept[position] += size
        return dict(kept)

    @property
    def alive(self) -> bool:
        """True if every child still runs."""
        return all(child.alive for child in self.children)

    def end(self) -> None:
        """Kill every child."""
        for child in self.children:
            child.end()

    def _next_message(self) -> tuple[int, Message] | None:
        try:
            return self._inbox.get(timeout=TICK_SECONDS)
        except queue.Empty:
            for child in self.children:
                child.sample_memory()
            return None

    def _silence(self, rank: int, seconds: float) -> RankFailure:
        stack = self.children[rank].find_stack()
        at, text = (f", at {stack.where}" if stack.where else "", stack.text) if stack is not None else ("", "")
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
                text = exit_causes.one_line(message.text, 80)
                return RankFailure(rank, "protocol", f"it sent something that is not a reply: {text!r}")
            case _:
                return RankFailure(rank, "protocol", f"it sent {type(message).__name__} when it was not asked for")


def exit_failure(rank: int, end: Exited) -> RankFailure:
    """The failure of a rank whose child has ended, by its exit code and last output."""
    memory = exit_causes.exit_is_memory(end.code, end.cap_share, end.kernel_killed, end.output)
    cause, words = exit_causes.describe_exit(end.code)
    return RankFailure(rank, cause, words, memory, output=end.output)


def error_failure(rank: int, error: ChildError) -> RankFailure:
    """The failure of a rank whose child reported an exception, in one line."""
    memory = exit_causes.error_is_memory(error.types, error.text)
    words = exit_causes.one_line(error.text)
    if error.types and error.types[0] not in _OWN_WORDS and not words.startswith(error.types[0]):
        words = f"{error.types[0]}: {words}"
    if error.where and error.where not in words:
        words = f"{error.where}: {words}"
    gpu = exit_causes.find_gpu_number(error.text) if memory else None
    own = bool(error.where) or any(kind in _USER_ERRORS for kind in error.types)
    user_code = own and not memory and not exit_causes.names_hardware(error.text)
    return RankFailure(rank, "raised", words, memory, gpu, error.traceback, user_code)
