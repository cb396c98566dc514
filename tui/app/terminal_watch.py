"""Notices that the terminal is gone where no signal tells so, and ends the app even if it waits for that terminal.

A hang-up signal goes to a terminal's own session only. Without it Textual's writer waits for ever on a terminal that is
deleted, its reader spins, and no signal handler of the loop runs any more.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable

LOOK_SECONDS = 0.5
GRACE_SECONDS = 2.0
CODE = 129  # as after SIGHUP


class HangUpWatch:
    """Calls `leave` once the terminal hangs up, then `end`, then exits, unless it is stopped within the grace."""

    def __init__(self, leave: Callable[[], None], end: Callable[[], None]) -> None:
        self._leave, self._end = leave, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evener-hang-up", daemon=True)

    def start(self) -> None:
        """Begin, if standard input is a terminal."""
        if sys.__stdin__ is not None and sys.__stdin__.isatty():
            self._thread.start()

    def stop(self) -> None:
        """The app has left the terminal by itself."""
        self._stopped.set()

    def _watch(self) -> None:
        assert sys.__stdin__ is not None
        poller = select.poll()
        poller.register(sys.__stdin__.fileno(), 0)  # nothing but hang-ups and errors, which are always told
        while not self._stopped.is_set():
            if poller.poll(0):
                break
            self._stopped.wait(LOOK_SECONDS)
        if self._stopped.is_set():
            return
        self._leave()
        if not self._stopped.wait(GRACE_SECONDS):
            ending = threading.Thread(target=self._end, daemon=True)
            ending.start()
            ending.join(GRACE_SECONDS)
            os._exit(CODE)  # the main thread waits for a terminal that is no more
