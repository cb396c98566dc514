"""Ends the app when its terminal is gone and no signal says so.

Only a terminal's own session gets the hang-up signal. Without it Textual's writer blocks forever on a deleted terminal,
its reader spins, and the loop runs no signal handler.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable

POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0
CODE = 129  # as after SIGHUP


class HangUpWatch:
    """When the terminal hangs up: calls `leave`, after a grace period `end`, then exits the process."""

    def __init__(self, leave: Callable[[], None], end: Callable[[], None]) -> None:
        self._leave, self._end = leave, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evener-hang-up", daemon=True)

    def start(self) -> None:
        """Start, if standard input is a terminal."""
        if sys.__stdin__ is not None and sys.__stdin__.isatty():
            self._thread.start()

    def stop(self) -> None:
        """The app has left the terminal; stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        assert sys.__stdin__ is not None
        poller = select.poll()
        poller.register(sys.__stdin__.fileno(), 0)  # no events but hang-ups and errors, which poll always reports
        while not self._stopped.is_set():
            if poller.poll(0):
                break
            self._stopped.wait(POLL_SECONDS)
        if self._stopped.is_set():
            return
        self._leave()
        if not self._stopped.wait(GRACE_SECONDS):
            ending = threading.Thread(target=self._end, daemon=True)
            ending.start()
            ending.join(GRACE_SECONDS)
            os._exit(CODE)  # the main thread is blocked on the terminal
