"""Start the full-screen app, and restore the terminal when it ends.

SIGHUP reaches only the processes in the terminal's own session. If the app isn't one of them and
the terminal is closed, Textual blocks forever, so a thread watches the terminal.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from evener.devices.sampler import open_sampler
from evener.devices.types import Snapshot
from evener.errors import RequestError

from .settings import load_settings, settings_path

if TYPE_CHECKING:
    from .app import EvenerApp

CRASH_EXIT_CODE = 70
LIBRARIES = ("textual",)  # installed by the extra `app`


def has_app() -> bool:
    """Return whether the app's libraries are installed."""
    return all(find_spec(name) is not None for name in LIBRARIES)


def prepare_app() -> None:
    """Prepare to start the app: turn off garbage collection until its first frame is drawn.

    Raises RequestError if the app's libraries are not installed.
    """
    # The app turns it on again after its first frame. The objects that are created until then stay,
    # and scanning them is slow.
    gc.disable()
    if not has_app():
        raise RequestError(
            "The app isn't installed.",
            "Install it: pip install 'evener[app]'. Every other command works without it.",
        )


def run_app(
    devices: str,
    *,
    theme: str | None = None,
    ray_address: str = "",
    serving: Callable[[Callable[[], Snapshot | None]], AbstractContextManager[object]]
    | None = None,
    **options: Any,
) -> int:
    """Run the app until the user leaves it, and return the exit code.

    - `devices`: the devices to read and to search on, such as "auto".
    - `theme`: overrides the theme of the settings, unless None.
    - `serving`: gets a function that returns the latest reading, and returns a context manager that
      serves it; active while the app runs.
    - `options`: further arguments of `EvenerApp`.

    Raises RequestError or DeviceError, before anything is drawn, if the app isn't installed or the
    devices are not available.
    """
    prepare_app()
    path = settings_path()
    settings, ignored = load_settings(path)
    publisher, trainable = open_sampler(devices, ray_address)
    publisher.interval_seconds = settings.interval_seconds
    publisher.start()
    from .app import EvenerApp

    app = EvenerApp(
        publisher,
        devices=devices,
        trainable=trainable,
        theme=theme or settings.theme,
        settings=settings,
        settings_file=None if options.get("readonly") else path,
        first_start=_is_first_start(options),
        **options,
    )
    app.ignored_settings = ignored
    code = draw_app(app, serving(publisher.latest) if serving else contextlib.nullcontext())
    return _run_demo(theme, options) if app.wants_demo else code


def _is_first_start(options: Mapping[str, Any]) -> bool:
    """Return whether to show the welcome dialog.

    It appears only on a terminal, and only if there are no stored runs. A read-only app or a replay
    doesn't show it.
    """
    from evener.balancer.store.runs import have_runs

    may_start = not options.get("readonly") and not options.get("replayed")
    return may_start and _owns_terminal() and not have_runs()


def _owns_terminal() -> bool:
    """Return whether the app runs on a real terminal rather than in a browser."""
    return sys.stdout.isatty() and "TEXTUAL_DRIVER" not in os.environ


def _run_demo(theme: str | None, options: Mapping[str, Any]) -> int:
    """Run `evener demo` with this app's theme and options, and return its exit code."""
    # The app has been closed. The demo is a separate process, which stores nothing.
    words = [*(["--theme", theme] if theme else []), *(["--ascii"] if options.get("ascii") else [])]
    return subprocess.call([sys.executable, "-P", "-m", "evener", "demo", *words])


def draw_app(
    app: EvenerApp,
    context: AbstractContextManager[object] = contextlib.nullcontext(),  # noqa: B008
) -> int:
    """Run `app` within `context`, a context manager, and return the exit code.

    Prints the app's closing lines to the terminal. Returns 129 if the terminal was closed, and 70
    after a crash, whose traceback is written to a file.
    """
    app.publisher.start()
    app.snapshot = app.publisher.latest()
    with watching_terminal(app.hang_up, app.close_threads):
        try:
            with context, _drawing_on_the_terminal():
                result = app.run()
        finally:
            _end_threads(app)
    if app.crash_log is not None or app.return_code == 1:
        where = (
            f"the traceback is in {app.crash_log}"
            if app.crash_log
            else "its traceback could not be written"
        )
        print(f"evener crashed; {where}.", file=sys.stderr)
        return CRASH_EXIT_CODE
    if result == CODE:
        _discard_output()
    elif _owns_terminal():
        for text in app.closing_lines(shutil.get_terminal_size().columns):
            print(text)
    return result or 0


def _discard_output() -> None:
    """Redirect the standard streams to /dev/null, because their terminal was closed."""
    # Otherwise Python would fail to flush the streams at exit, and would exit with 120.
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(
                AttributeError, OSError, ValueError
            ):  # the stream may be closed or missing
                os.dup2(nowhere.fileno(), stream.fileno())  # type: ignore[union-attr]


def _end_threads(app: EvenerApp) -> None:
    """Stop the app's threads and Textual's input thread."""
    # Textual has stopped its input thread already. But a hang-up is followed by SIGCONT, on which
    # Textual starts another input thread.
    app.close_threads()
    getattr(app._driver, "exit_event", threading.Event()).set()


@contextlib.contextmanager
def _drawing_on_the_terminal() -> Iterator[None]:
    """Context manager: if standard error is redirected, draw on the terminal of standard output.

    By default, Textual draws on standard error.
    """
    before = sys.__stderr__
    if before is not None and before.isatty():
        yield
        return
    with open(os.dup(1), "w", encoding="utf-8") as terminal:
        sys.__stderr__ = terminal  # type: ignore[misc] # declared Final in typeshed
        try:
            yield
        finally:
            sys.__stderr__ = before  # type: ignore[misc]


GRACE_SECONDS = 2.0
CODE = 129  # the exit code after SIGHUP


@contextmanager
def watching_terminal(leave: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Context manager that calls `leave` as soon as the terminal is closed.

    If the app hasn't ended two seconds later, calls `end` and exits the process with code 129.
    """
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
