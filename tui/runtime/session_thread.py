"""A session, or the replay of one, on a thread of its own: events out as messages, stop and pause in."""

from __future__ import annotations

import itertools
import os
import platform
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from textual.message import Message

from evener.balancer.events import Event, EventThread, ProbeProgress
from evener.errors import EvenerError
from evener.system.files import make_private

Post = Callable[[Message], object]
JOIN_SECONDS = 30.0  # a session that hangs must not block the terminal forever
_SERIALS = itertools.count(1)


@dataclass
class SessionReported(Message):
    """An event of a session, or of the replay of one; `source` is its number."""

    source: int
    event: Event

    def can_replace(self, message: Message) -> bool:
        """True for newer progress of the same probe; every other event counts."""
        return (
            isinstance(message, SessionReported)
            and isinstance(message.event, ProbeProgress)
            and isinstance(self.event, ProbeProgress)
            and message.source == self.source
            and message.event.probe == self.event.probe
        )


@dataclass
class SessionEnded(Message):
    """A session's thread has ended; `fault` and `remedy` say why if it failed."""

    source: int
    fault: str = ""
    remedy: str = ""


class SessionThread:
    """Runs one session; every event is posted, the last message is `SessionEnded`."""

    def __init__(self, make: Callable[[], EventThread], post: Post) -> None:
        self.source = next(_SERIALS)
        self._make = make
        self._post = post
        self._session: EventThread | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-session", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the session to end with its best plan so far."""
        self._stopping.set()
        if self._session is not None:
            self._session.stop()

    def pause(self, paused: bool) -> None:
        """Pause the session, or resume it."""
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
            with closing(self._make()) as self._session:
                if self._stopping.is_set():
                    self._session.stop()
                for event in self._session.events():
                    self._post(SessionReported(self.source, event))
        except EvenerError as error:
            fault, remedy = error.message, error.remedy
        except Exception as error:  # a bug becomes a sentence on the screen, with its traceback kept
            fault, remedy = f"The session crashed: {error!r}.", f"The traceback is in {write_crash_log(error)}."
        self._post(SessionEnded(self.source, fault, remedy))


def write_crash_log(error: BaseException) -> Path | None:
    """Write the traceback to a new file and return its path; None if no file can be written."""
    import platformdirs

    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = f"evener on Python {platform.python_version()}, {platform.platform()}\n\n"
    text += "".join(traceback.format_exception(error))
    for folder in (Path(platformdirs.user_state_dir("evener")) / "crashes", Path(tempfile.gettempdir())):
        with suppress(OSError):
            make_private(folder)
            _write_new(folder / name, text)
            return folder / name
    return None


def _write_new(path: Path, text: str) -> None:
    """Write a new and private file: in a shared folder, an existing name could be another user's link."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as stream:
        stream.write(text)
