"""Work that reports events, on a thread of its own: it is read, paused and stopped from other threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from .events import Event

CLOSE_SECONDS = 5.0


class EventThread:
    """Does `_work`: it reports by `_events.put`, waits for `_going` before it begins anything, and ends at `_halt`.

    A signal that interrupts the reader of the events doesn't break it: the handler calls `stop`, and reading goes on.
    """

    def __init__(self) -> None:
        self._halt, self._going = threading.Event(), threading.Event()
        self._going.set()
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drive, name="evener-session", daemon=True)

    def events(self) -> Iterator[Event]:
        """Start, and yield what happens; what ended the work is raised. It can be iterated again after an interrupt."""
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
