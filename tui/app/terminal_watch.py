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

GRACE_SECONDS = 2.0
CODE = 129  # as after SIGHUP


@contextmanager
def watching_terminal(leave: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """While the app runs on a terminal: when it hangs up, call `leave`, after a grace period `end`, then exit."""
    if sys.__stdin__ is None or not (sys.__stdin__.isatty() or "TEXTUAL_DRIVER" in os.environ):
        yield
        return
    stopped, stopping = os.pipe()
    arguments = (sys.__stdin__.fileno(), stopped, leave, end)
    watcher = threading.Thread(target=_watch, args=arguments, name="evener-hang-up", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.write(stopping, b".")
        watcher.join()
        os.close(stopping)
        os.close(stopped)


def _watch(terminal: int, stopped: int, leave: Callable[[], None], end: Callable[[], None]) -> None:
    poller = select.poll()
    poller.register(stopped, select.POLLIN)
    poller.register(terminal, 0)  # no events but hang-ups and errors, which poll always reports
    if any(which == stopped for which, _ in poller.poll()):
        return
    poller.unregister(terminal)
    leave()
    if not poller.poll(1000 * GRACE_SECONDS):
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(GRACE_SECONDS)
        os._exit(CODE)  # the main thread is blocked on the terminal
