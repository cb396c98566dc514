"""The full-screen app: its screens and keys, and starting it on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.events import Event, Key
from textual.screen import ModalScreen, Screen
from textual.widgets import Input

from evener.devices.types import Snapshot
from evener.errors import RequestError
from evener.tui.app.terminal_watch import watching_terminal
from evener.tui.app.theme import DARK, LIGHT, meanings
from evener.tui.runtime.base_app import BaseApp
from evener.tui.runtime.crash_log import write_crash_log
from evener.tui.runtime.snapshot_publisher import SnapshotPublisher, open_publisher
from evener.tui.widgets.bars import SCREENS

CRASH_EXIT_CODE = 70
THEMES = {"dark": "evener-dark", "light": "evener-light"}


def _made_by(name: str) -> Callable[[], Screen[None]]:
    """Makes a screen when it is opened for the first time; its module is imported then."""
    return lambda: getattr(import_module(f"evener.tui.screens.{name}"), f"{name.title()}Screen")()


class EvenerApp(BaseApp):
    """Four screens over one stream of snapshots and at most one session at a time."""

    TITLE = "evener"
    CSS_PATH = "app.tcss"
    MODES: ClassVar[dict[str, str | Callable[[], Screen[None]]]] = {name: _made_by(name) for name in SCREENS}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "show('monitor')", "Monitor", show=False),
        Binding("2", "show('balance')", "Balance", show=False),
        Binding("3", "show('runs')", "Runs", show=False),
        Binding("4", "show('trainings')", "Trainings", show=False),
        Binding("question_mark,h,f1", "help", "Help", key_display="?"),
        Binding("T", "switch_theme", "Dark or light", show=False),
        Binding("q", "leave", "Quit"),
        Binding("ctrl+c", "quit", "Quit now", show=False, priority=True),
    ]

    def __init__(self, publisher: SnapshotPublisher, *, theme: str = "dark", **options: Any) -> None:
        super().__init__(publisher, **options)
        self.crash_log: Path | None = None
        self._started_on: asyncio.AbstractEventLoop | None = None
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = THEMES[theme]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """evener's own colours, for Textual's themes, which don't define them."""
        return meanings(dark=True)

    async def on_mount(self) -> None:
        """Open the Monitor, start sampling, and end in good order on SIGTERM and SIGHUP."""
        # not by DEFAULT_MODE: from Python 3.12 on its widgets are mounted before any screen is on the stack
        await self.switch_mode("monitor")
        loop = self._started_on = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            try:
                loop.add_signal_handler(number, self.exit, 128 + number)
            except (ValueError, RuntimeError, NotImplementedError):
                break  # not in the main thread: the caller handles signals
        self.publisher.post_to(self.post_message)

    async def on_event(self, event: Event) -> None:
        """Finish each key before the next one.

        Textual passes a key through the widgets first, and runs what Tab or Ctrl-U is bound to when it comes back from
        them: text typed at once after it has by then gone to the field before, or is deleted.
        """
        if not isinstance(event, Key) or event.is_forwarded:
            await super().on_event(event)
            return
        self.app_focus = True
        field = self.focused
        if isinstance(field, Input) and event.is_printable:
            field.replace(event.character or "", *field.selection)
        elif not (await self._check_bindings(event.key, priority=True) or await self._check_bindings(event.key)):
            await super().on_event(event)

    def hang_up(self) -> None:
        """The terminal is gone: end as after SIGHUP; called from any thread."""
        if self._started_on is not None:
            self._started_on.call_soon_threadsafe(self.exit, 128 + signal.SIGHUP)

    async def on_unmount(self) -> None:
        """Join every thread before the terminal is restored."""
        await asyncio.to_thread(self.close_threads)

    async def action_leave(self) -> None:
        """Quit; ask first while a search is running."""
        from evener.tui.screens.dialogs import confirm

        if not self.balance.active:
            self.exit()
            return
        question = "A search is running. Quit? Its measurements are kept, and the run can be resumed."
        confirm(self, "Quit", question, self.exit)

    def action_show(self, name: str) -> None:
        """Open one of the screens, unless a dialog waits for an answer."""
        if name != self.current_mode and not isinstance(self.screen, ModalScreen):
            self.switch_mode(name)

    def action_help(self) -> None:
        """Open the help page."""
        from evener.tui.screens.dialogs import DetailsDialog
        from evener.tui.view.help import help_lines

        if not isinstance(self.screen, ModalScreen):
            notes = self.snapshot.notes if self.snapshot is not None else ()
            self.push_screen(DetailsDialog("Help", lambda width: help_lines(notes, self.marks, width)))

    def action_switch_theme(self) -> None:
        """Switch between dark and light."""
        self.theme = THEMES["light" if self.current_theme.dark else "dark"]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the command palette offers in addition to the keys of the screen."""
        for name, title in SCREENS.items():
            yield SystemCommand(f"Show {title}", f"The {title} screen", lambda name=name: self.action_show(name))
        yield SystemCommand("Dark or light", "Switch between the two themes", self.action_switch_theme)
        yield SystemCommand("Theme", "Choose among all themes", self.action_change_theme)
        yield SystemCommand("Help", "Keys, and what the marks mean", self.action_help)
        if not self.readonly:
            yield SystemCommand("Save a picture", "The screen as an SVG file", self.action_screenshot)
        yield SystemCommand("Quit", "Leave evener", self.action_leave)

    def _handle_exception(self, error: Exception) -> None:
        """Keep the traceback in a file, so that the terminal stays clean; `run_app` prints where."""
        self.crash_log = self.crash_log or write_crash_log(error)
        super()._handle_exception(error)
        self._exit_renderables.clear()


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
    publisher, trainable = open_publisher(devices, replay, ray_address)
    app = EvenerApp(publisher, devices=devices, trainable=trainable, theme=theme or "dark", **options)
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
