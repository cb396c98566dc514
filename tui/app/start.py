"""Starts the app on a terminal; the devices are read for the first time while Textual is imported."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from evener.devices.types import Snapshot
from evener.errors import RequestError

from ..runtime.snapshot_publisher import open_publisher

CRASH_EXIT_CODE = 70
THEMES = ("dark", "light")


def run_app(
    devices: str,
    *,
    theme: str | None = None,
    replay: Path | None = None,
    ray_address: str = "",
    serving: Callable[[Callable[[], Snapshot | None]], AbstractContextManager[object]] | None = None,
    **options: Any,
) -> int:
    """Run the app on this terminal and return the exit code; `options` are the app's own.

    `serving` is entered with what gives the latest reading. RequestError and DeviceError (devices, replay file,
    address) are raised before the terminal is touched.
    """
    if theme not in (None, *THEMES):
        raise RequestError(f"--theme {theme!r} is not known.", "Choose dark or light; the app itself has more.")
    gc.disable()  # the app collects once it has been drawn: what a start makes stays, and looking through it is slow
    publisher, trainable = open_publisher(devices, replay, ray_address)
    publisher.start()
    from .app import EvenerApp
    from .terminal_watch import watching_terminal

    app = EvenerApp(publisher, devices=devices, trainable=trainable, theme=theme or "dark", **options)
    app.snapshot = publisher.latest()
    with watching_terminal(app.hang_up, app.close_threads):
        try:
            with serving(publisher.latest) if serving else contextlib.nullcontext(), _drawing_on_the_terminal():
                result = app.run()
        finally:
            app.close_threads()
    if app.crash_log is not None or app.return_code == 1:
        where = f"the traceback is in {app.crash_log}" if app.crash_log else "its traceback could not be written"
        print(f"evener crashed; {where}.", file=sys.stderr)
        return CRASH_EXIT_CODE
    return result or 0


@contextlib.contextmanager
def _drawing_on_the_terminal() -> Iterator[None]:
    """Textual draws on `sys.__stderr__`: while the app runs, that is standard output's terminal if stderr is a file."""
    before = sys.__stderr__
    if before is not None and before.isatty():
        yield
        return
    with open(os.dup(1), "w", encoding="utf-8") as terminal:
        sys.__stderr__ = terminal  # type: ignore[misc] # final for those who import it
        try:
            yield
        finally:
            sys.__stderr__ = before  # type: ignore[misc]
