"""The events of a session, for a terminal, a screen or a viewer of journals, and the thread that
reports them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import msgspec

from evener.plan.file import Plan

from .types import Belief, Observation, Probe, Result
from .verdict import Verdict

CLOSE_SECONDS = 5.0


class Started(msgspec.Struct, frozen=True, tag=True):
    """The session began. `replayed` observations came from the journal and were not measured
    again.
    """

    run: str
    devices: tuple[str, ...]  # labels, in the order of the request
    workload: str
    budget_seconds: float | None
    replayed: int
    notes: tuple[str, ...] = ()  # to show: what `auto` chose, devices that others use


class ProbeStarted(msgspec.Struct, frozen=True, tag=True):
    """A measurement began; several run at the same time."""

    probe: Probe
    at_seconds: float  # of the session's clock


class ProbeProgress(msgspec.Struct, frozen=True, tag=True):
    """The progress of a running measurement, at least once a second. A later report replaces it."""

    probe: Probe
    # starting | building | warming up | measuring; stopped while building: importing | loading |
    # preparing
    phase: str
    samples_per_second: float | None
    relative_interval: float | None  # half-width of the 95 % interval / the figure
    at_seconds: float
    phase_seconds: float = 0.0  # how long it has been in this phase
    where: str = ""  # "file.py:12": the user's own line at which it was stopped


Report = Callable[[ProbeProgress], None]  # is called from any thread


class Observed(msgspec.Struct, frozen=True, tag=True):
    """A measurement ended, was journalled, and the search has it."""

    seen: Observation
    belief: Belief
    best: Result | None
    probes: int  # so far, including replayed ones
    out_of_memory: int
    at_seconds: float


class Paused(msgspec.Struct, frozen=True, tag=True):
    """No new probe starts until the session continues."""

    at_seconds: float


class Finished(msgspec.Struct, frozen=True, tag="ended", tag_field="entry"):
    """The session ended with a plan; a line of its journal. A resumed run may end again; the last
    end counts.
    """

    plan: Plan
    results: tuple[Result, ...]  # every layout measured in the race, best first
    verdict: str  # what to do and what it gains, then remarks, a line each
    interrupted: bool  # by the user, with the best plan so far
    at_seconds: float
    budget_seconds: float | None = None  # if it isn't that of the request any more
    found: Verdict | None = None  # the verdict's fields; None in journals up to 0.2


Event = Started | ProbeStarted | ProbeProgress | Observed | Paused | Finished


class EventThread:
    """Work that reports events as it goes.

    `run` does it on the caller's thread. Otherwise it has a thread of its own, and the caller reads
    `events`. A subclass does its work in `_work`: it reports with `_emit`, waits for `_going`
    before each thing it begins, and ends once `_halt` is set.

    A signal that interrupts the reader of the events doesn't break it: the handler calls `stop`,
    and reading goes on.
    """

    def __init__(self) -> None:
        self._halt = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._emit: Callable[[Event], object] = self._events.put
        self._thread = threading.Thread(target=self._drive, name="evener-session", daemon=True)

    def run(self, report: Callable[[Event], object]) -> None:
        """Work on this thread, and report each event as it happens; it may come from another
        thread.
        """
        self._emit = report
        self._work()

    def events(self) -> Iterator[Event]:
        """Start, and yield what happens; what ended the work is raised. It can be iterated again
        after an interrupt.
        """
        if self._thread.ident is None:
            self._thread.start()
        return iter(self._next_event, None)

    def stop(self) -> None:
        """End soon; from any thread or signal handler."""
        self._halt.set()
        self._going.set()

    def pause(self) -> None:
        """Begin nothing more; what runs continues."""
        self._going.clear()

    def unpause(self) -> None:
        """Continue after `pause`."""
        self._going.set()

    def close(self) -> None:
        """Stop, and wait until it has ended; safe to call twice."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        raise NotImplementedError

    def _drive(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._events.put(error)
        finally:
            self._events.put(None)

    def _next_event(self) -> Event | None:
        event = self._events.get()
        if event is None:
            self._events.put(None)  # for a reader that goes on
        if isinstance(event, BaseException):
            raise event
        return event
