"""Events that a running search emits, and the thread that produces them."""

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
    """The search has started; `replayed` is the number of outcomes read from its journal."""

    run: str
    devices: tuple[str, ...]  # labels, in the order of the request
    workload: str
    budget_seconds: float | None
    replayed: int
    # for the user: what `auto` chose, and devices that other programs use
    notes: tuple[str, ...] = ()


class ProbeStarted(msgspec.Struct, frozen=True, tag=True):
    """A probe has started."""

    probe: Probe
    at_seconds: float  # on the session's clock


class ProbeProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of a running probe, sent at least once a second.

    The throughput and its interval are None until steps have been timed.
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
    """A probe has ended. The event has its outcome, new predictions, and the best layout so far."""

    seen: Observation
    belief: Belief
    best: Result | None
    probes: int  # number of probes until now, including replayed ones
    out_of_memory: int
    at_seconds: float


class Paused(msgspec.Struct, frozen=True, tag=True):
    """The search is paused, until it is resumed."""

    at_seconds: float


class Finished(msgspec.Struct, frozen=True, tag="ended", tag_field="entry"):
    """The search has ended, with its plan and verdict.

    This event is also the journal's last entry.
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
    """Base class for a search that runs in its own thread and emits events.

    Subclasses implement `_work`, which calls `_emit` for each event.
    """

    def __init__(self) -> None:
        self._halt = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._emit: Callable[[Event], object] = self._events.put
        self._thread = threading.Thread(target=self._drive, name="evener-session", daemon=True)

    def run(self, report: Callable[[Event], object]) -> None:
        """Run in the calling thread instead of a new one, and pass each event to `report`."""
        self._emit = report
        self._work()

    def events(self) -> Iterator[Event]:
        """Start the thread at the first call, and yield its events until it ends.

        If the thread raises an exception, it is raised here.
        """
        if self._thread.ident is None:
            self._thread.start()
        return iter(self._next_event, None)

    def stop(self) -> None:
        """Ask the search to end with the best plan so far, even if it is paused.

        May be called from any thread or signal handler.
        """
        self._halt.set()
        self._going.set()

    def pause(self) -> None:
        """Pause the search before its next probe."""
        self._going.clear()

    def unpause(self) -> None:
        """Resume a paused search."""
        self._going.set()

    def close(self) -> None:
        """Stop the thread, and wait a few seconds for it to end."""
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
