"""Ends the app when its terminal, or the server of its browser, is gone and no signal says so.

Only a terminal's own session gets the hang-up signal. Without it Textual's writer blocks forever on a deleted terminal,
its reader spins, and the loop runs no signal handler.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0
CODE = 129  # as after SIGHUP


@contextmanager
def watching_terminal(leave: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """While the app runs on a terminal: when it hangs up, call `leave`, after a grace period `end`, then exit."""
    stopped = threading.Event()
    if sys.__stdin__ is not None and (sys.__stdin__.isatty() or "TEXTUAL_DRIVER" in os.environ):
        arguments = (sys.__stdin__.fileno(), stopped, leave, end)
        threading.Thread(target=_watch, args=arguments, name="evener-hang-up", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def _watch(terminal: int, stopped: threading.Event, leave: Callable[[], None], end: Callable[[], None]) -> None:
    poller = select.poll()
    poller.register(terminal, 0)  # no events but hang-ups and errors, which poll always reports
    while not poller.poll(0):
        if stopped.wait(POLL_SECONDS):
            return
    leave()
    if not stopped.wait(GRACE_SECONDS):
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(GRACE_SECONDS)
        os._exit(CODE)  # the main thread is blocked on the terminal
