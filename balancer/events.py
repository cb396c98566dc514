"""The events that a session reports, and the thread that reports them.

A terminal or a screen displays them. Replaying a journal yields the same events again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import msgspec

from evener.plan.file import Plan

from .types import Belief, Observation, Probe, Result
from .verdict import Verdict

CLOSE_SECONDS = 5.0  # timeout for a thread to end; killing all children takes a second or two


class Started(msgspec.Struct, frozen=True, tag=True):
    """The session began.

    `replayed` is the number of observations that were read from the journal of a resumed run.
    """

    run: str
    devices: tuple[str, ...]  # labels, in the order of the request
    workload: str
    budget_seconds: float | None
    replayed: int
    # for the user: what `auto` chose, and devices that other programs use
    notes: tuple[str, ...] = ()


class ProbeStarted(msgspec.Struct, frozen=True, tag=True):
    """A measurement began. Several may run at the same time."""

    probe: Probe
    at_seconds: float  # on the session's clock


class ProbeProgress(msgspec.Struct, frozen=True, tag=True):
    """The progress of a running measurement.

    A measurement sends a report at least once a second. Each report replaces the previous one.
    """

    probe: Probe
    # starting | building | warming up | measuring; stopped while building: importing | loading |
    # preparing
    phase: str
    samples_per_second: float | None
    relative_interval: float | None  # half-width of the 95 % interval, relative to the value
    at_seconds: float
    phase_seconds: float = 0.0  # time spent in this phase
    where: str = ""  # "file.py:12": the line of the user's code at which it was stopped


Report = Callable[[ProbeProgress], None]  # may be called from any thread


class Observed(msgspec.Struct, frozen=True, tag=True):
    """A measurement has ended; it is in the journal, and the search knows it.

    `belief` is what the search now predicts for each device. `best` is the result of the best
    layout so far, if there is one.
    """

    seen: Observation
    belief: Belief
    best: Result | None
    probes: int  # number of probes until now, including replayed ones
    out_of_memory: int
    at_seconds: float


class Paused(msgspec.Struct, frozen=True, tag=True):
    """The session is paused: no new probe starts until it continues."""

    at_seconds: float


class Finished(msgspec.Struct, frozen=True, tag="ended", tag_field="entry"):
    """The session ended with a plan. The journal stores this event as a line.

    The journal of a resumed run may have several such lines. Only the last one counts.
    """

    plan: Plan
    results: tuple[Result, ...]  # every layout measured in the race, best first
    verdict: str  # the recommendation and its gains, then remarks, one per line
    interrupted: bool  # stopped by the user, with the best plan until then
    at_seconds: float
    budget_seconds: float | None = None  # if it differs from the request's
    found: Verdict | None = None  # the verdict's fields; None in journals up to 0.2


Event = Started | ProbeStarted | ProbeProgress | Observed | Paused | Finished


class EventThread:
    """Does work and reports events about it.

    `run` does the work on the caller's thread. `events` starts a separate thread for it. The
    remaining events can still be read after `stop`, which a signal handler may call.

    A subclass implements `_work`, which reports events with `_emit`. `_work` must wait for `_going`
    before it starts anything new, and return once `_halt` is set.
    """

    def __init__(self) -> None:
        self._halt = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._emit: Callable[[Event], object] = self._events.put
        self._thread = threading.Thread(target=self._drive, name="evener-session", daemon=True)

    def run(self, report: Callable[[Event], object]) -> None:
        """Do the work on this thread, and report each event.

        `report` is called with each event as it happens. Other threads may call `report`, too.
        """
        self._emit = report
        self._work()

    def events(self) -> Iterator[Event]:
        """Start the work and yield its events until it ends.

        An exception that ended the work is raised here. After an interrupt, call this again to get
        the remaining events.
        """
        if self._thread.ident is None:
            self._thread.start()
        return iter(self._next_event, None)

    def stop(self) -> None:
        """Request that the work ends soon.

        Any thread or signal handler may call this.
        """
        self._halt.set()
        self._going.set()

    def pause(self) -> None:
        """Start no new work until `unpause` is called. Work in progress continues."""
        self._going.clear()

    def unpause(self) -> None:
        """Allow new work to start again, after `pause`."""
        self._going.set()

    def close(self) -> None:
        """Stop the work and wait for its end, for at most `CLOSE_SECONDS`.

        May be called more than once.
        """
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
            self._events.put(None)  # for a reader that continues after this one
        if isinstance(event, BaseException):
            raise event
        return event
