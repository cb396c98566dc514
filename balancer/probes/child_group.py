"""The children that take part in one layout: ordered at once, heard together, ended together.

One child alone, one child over several GPUs, or a child for each device that step in a group. The first trouble of one
is the end of all; which of several troubles was the cause is told from what each says.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import msgspec

from evener.balancer.probes import exit_causes
from evener.balancer.probes.child import Child, Gone, Inbox, Nonsense
from evener.balancer.probes.protocol import Order, Reply, Trouble
from evener.balancer.types import Cause

TICK_SECONDS = 0.05
GRACE_SECONDS = 1.0  # for the others of a group to say why they stopped, once one has


class StoppedError(Exception):
    """The session stops: what was going on has no outcome."""


class Mishap(msgspec.Struct, frozen=True):
    """What happened to one rank."""

    rank: int
    out_of_memory: bool
    cause: Cause
    detail: str
    gpu: int | None = None  # the framework's number of the GPU that ran out or has gone, if that is known


class BrokenError(Exception):
    """The party can't go on; its children are not to be used again."""

    def __init__(self, mishaps: tuple[Mishap, ...]) -> None:
        super().__init__(mishaps)
        self.mishaps = mishaps

    @property
    def first(self) -> Mishap:
        """The likely cause: memory before errors, errors before ends, ends before silence."""
        order: dict[Cause, int] = {
            "device": 0, "raised": 1, "signal": 2, "exit": 3, "protocol": 4, "unsupported": 5, "timeout": 6,
        }  # fmt: skip
        return min(self.mishaps, key=lambda m: (not m.out_of_memory, _bystander(m), order[m.cause], m.rank))


class Party:
    """Children in rank order, with one inbox."""

    def __init__(self, children: tuple[Child, ...], inbox: Inbox) -> None:
        self.children = children
        self._inbox = inbox

    def order(
        self, order: Callable[[int], Order], expected: type[Reply], seconds: float, stop: threading.Event
    ) -> list[Reply]:
        """Give every rank its order at once and wait for all replies; BrokenError if they don't come."""
        for child in self.children:
            child.send(order(child.rank))
        return self.hear(expected, seconds, stop)

    def hear(self, expected: type[Reply], seconds: float, stop: threading.Event) -> list[Reply]:
        """One reply of the expected kind from every rank, in rank order."""
        deadline = time.monotonic() + seconds
        replies: dict[int, Reply] = {}
        mishaps: dict[int, Mishap] = {}
        while len(replies) + len(mishaps) < len(self.children):
            if stop.is_set():
                raise StoppedError
            try:
                rank, said = self._inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                for child in self.children:
                    child.look()
                if time.monotonic() > deadline:
                    break
                continue
            if isinstance(said, expected) and rank not in replies:
                replies[rank] = said
            elif rank not in mishaps:
                replies.pop(rank, None)
                mishaps[rank] = self._mishap(rank, said)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        silent = [child.rank for child in self.children if child.rank not in replies and child.rank not in mishaps]
        if mishaps or silent:
            late = tuple(Mishap(rank, False, "timeout", f"no answer within {seconds:.0f} s") for rank in silent)
            raise BrokenError((*mishaps.values(), *late))
        return [replies[child.rank] for child in self.children]

    @property
    def usable(self) -> bool:
        """Every child still lives."""
        return all(child.alive for child in self.children)

    def end(self) -> None:
        """Kill every child."""
        for child in self.children:
            child.end()

    def _mishap(self, rank: int, said: Reply | Gone | Nonsense) -> Mishap:
        match said:
            case Trouble():
                return _from_trouble(rank, said)
            case Gone():
                child = self.children[rank]
                memory = exit_causes.end_is_memory(said.code, child.cap_share, child.kernel_killed, child.chatter)
                cause, words = exit_causes.end_in_words(said.code)
                return Mishap(rank, memory, cause, words)
            case Nonsense():
                return Mishap(
                    rank, False, "protocol", f"it said what is no reply: {exit_causes.one_line(said.text, 80)!r}"
                )
            case _:
                return Mishap(rank, False, "protocol", f"it answered {type(said).__name__} out of turn")


def _from_trouble(rank: int, said: Trouble) -> Mishap:
    memory = exit_causes.error_is_memory(said.types, said.text)
    words = exit_causes.one_line(said.text)
    if (
        said.types
        and said.types[0] not in ("UserCodeError", "RequestError", "EvenerError")
        and not words.startswith(said.types[0])
    ):
        words = f"{said.types[0]}: {words}"
    if said.where and said.where not in words:
        words = f"{said.where}: {words}"
    return Mishap(rank, memory, "raised", words, exit_causes.gpu_named(said.text) if memory else None)


_ABANDONED = ("unavailable", "cancelled", "canceled", "connection reset", "connection closed", "has gone", "aborted")


def _bystander(mishap: Mishap) -> bool:
    """Whether its words are those of a rank that merely lost another."""
    return mishap.cause == "raised" and any(sign in mishap.detail.lower() for sign in _ABANDONED)
