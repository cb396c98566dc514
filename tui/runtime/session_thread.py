"""Sessions and replays on threads of their own: events out as messages, stop and pause in, joined at the end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from textual.message import Message

from evener.balancer.events import Event
from evener.errors import EvenerError
from evener.tui.runtime.messages import SessionEnded, SessionReported

Post = Callable[[Message], object]
JOIN_SECONDS = 30.0  # a session that hangs must not hold the terminal for ever
_SERIALS = itertools.count(1)


class Live(Protocol):
    """What of `evener.balancer.session.Session` the app uses."""

    def events(self) -> Iterable[Event]:
        """Each event as it happens; ends after the last."""
        ...

    def stop(self) -> None:
        """End soon, with the best plan so far; from any thread."""
        ...

    def pause(self) -> None:
        """Start no new probe."""
        ...

    def unpause(self) -> None:
        """Go on."""
        ...

    def close(self) -> None:
        """End every child and let go of the devices."""
        ...


class SessionThread:
    """Runs one session; every event is posted, the last message is `SessionEnded`."""

    def __init__(self, make: Callable[[], Live], post: Post) -> None:
        self.source = next(_SERIALS)
        self._make = make
        self._post = post
        self._session: Live | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-session", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the session to end with its best plan so far."""
        self._stopping.set()
        if self._session is not None:
            self._session.stop()

    def pause(self, paused: bool) -> None:
        """Hold the session, or let it go on."""
        if self._session is not None:
            (self._session.pause if paused else self._session.unpause)()

    def close(self) -> None:
        """Stop, and wait until its children are gone."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        fault = remedy = ""
        try:
            self._session = self._make()
            try:
                if self._stopping.is_set():
                    self._session.stop()
                for event in self._session.events():
                    self._post(SessionReported(self.source, event))
            finally:
                self._session.close()
        except EvenerError as error:
            fault, remedy = error.message, error.remedy
        except Exception as error:  # a bug must end as a sentence on the screen, with its traceback kept
            from evener.tui.runtime.crash_log import write_crash_log

            fault, remedy = f"The session broke: {error!r}.", f"The traceback is in {write_crash_log(error)}."
        self._post(SessionEnded(self.source, fault, remedy))


class ReplayThread:
    """Posts recorded events again, `speed` times as fast as they were, no gap longer than `longest_gap_seconds`."""

    def __init__(
        self, events: Iterable[Event], post: Post, *, speed: float = 8.0, longest_gap_seconds: float = 0.7
    ) -> None:
        self.source = next(_SERIALS)
        self._events = events
        self._post = post
        self._speed = speed
        self._longest_gap_seconds = longest_gap_seconds
        self._stopping = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._thread = threading.Thread(target=self._run, name="evener-replay", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def pause(self, paused: bool) -> None:
        """Hold the replay, or let it go on."""
        (self._going.clear if paused else self._going.set)()

    def close(self) -> None:
        """End now, and wait for the thread."""
        self._stopping.set()
        self._going.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        before = 0.0
        for event in self._events:
            at_seconds = float(getattr(event, "at_seconds", before))
            gap = min(self._longest_gap_seconds, max(0.0, at_seconds - before) / self._speed)
            before = at_seconds
            if self._stopping.wait(gap):
                return
            self._going.wait()
            self._post(SessionReported(self.source, event))
        self._post(SessionEnded(self.source))
