"""The app with its four screens, and its key bindings, themes, settings and exit."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, get_args

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.events import Event, Key
from textual.screen import ModalScreen, Screen
from textual.theme import Theme
from textual.widget import AwaitMount
from textual.widgets import Input

from evener.balancer.journal import JournalContents
from evener.devices.sampler import Sampler

from .base_app import BaseApp, Sampled, write_crash_log
from .screens.base import SCREENS
from .settings import ThemeName

YOUNG_OBJECTS = 10_000  # more than a tick creates: these objects need no garbage collection
# keys whose names begin with a capital letter everywhere
SPELLED_KEYS = ("space", "tab", "esc", "enter", "home", "end")
MakeScreen = Callable[[], Screen[None]]


def _screen_maker(name: str) -> MakeScreen:
    """Return a factory that imports the module of a screen only when the screen is first shown."""
    return lambda: getattr(import_module(f"evener.tui.screens.{name}"), f"{name.title()}Screen")()


def _keys_provider() -> type[Provider]:
    from .palette import KeysProvider

    return KeysProvider


def _app_provider() -> type[Provider]:
    from .palette import AppProvider

    return AppProvider


def _runs_provider() -> type[Provider]:
    from .palette import RunsProvider

    return RunsProvider


def _settings_provider() -> type[Provider]:
    from .palette import SettingsProvider

    return SettingsProvider


class EvenerApp(BaseApp):
    """The evener app, with a Textual mode for each screen: Monitor, Balance, Runs and Trainings.

    Use `tui.start.draw_app` to run it.

    - `publisher`: the sampler that reads the devices.
    - `theme`: "dark", "light" or "contrast".
    - `replayed`: a recorded run to replay at the start, and its playback speed; or None.
    - `first_start`: open the welcome dialog.
    - `options`: arguments of `BaseApp`.
    """

    TITLE = "evener"
    COMMANDS: ClassVar[set[Any]] = {
        _keys_provider,
        _app_provider,
        _runs_provider,
        _settings_provider,
    }
    CSS_PATH = "app.tcss"
    MODES: ClassVar[dict[str, str | MakeScreen]] = {name: _screen_maker(name) for name in SCREENS}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "show('monitor')", "Monitor", show=False),
        Binding("2", "show('balance')", "Balance", show=False),
        Binding("3", "show('runs')", "Runs", show=False),
        Binding("4", "show('trainings')", "Trainings", show=False),
        Binding("ctrl+p", "command_palette", "Keys", key_display="Ctrl-P"),
        Binding("question_mark,h,f1", "help", "Help", key_display="?"),
        Binding("T", "switch_theme", "Next theme", show=False),
        Binding("f2,comma", "settings", "Settings", show=False, key_display="F2"),
        Binding("q", "leave", "Quit"),
        Binding("ctrl+c", "quit", "Quit now", show=False, priority=True),
    ]

    def __init__(
        self,
        publisher: Sampler,
        *,
        theme: str = "dark",
        replayed: tuple[JournalContents, float] | None = None,
        first_start: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(publisher, **options)
        self._replayed = replayed  # the run to replay first, and how many times as fast
        self._first_start = first_start
        self.wants_demo = False  # whether to run the demo after the app is closed
        self.crash_log: Path | None = None
        self.ignored_settings = ""  # why the settings file wasn't read
        self._started_on: asyncio.AbstractEventLoop | None = None
        self._makes_screen = False
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.register_theme(CONTRAST)
        self.theme = f"evener-{theme}"

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return evener's dark colours as defaults, because Textual's own themes lack them."""
        return theme_variables(dark=True)

    async def on_mount(self) -> None:
        """Show the first screen, install signal handlers, and start to read the devices."""
        # not by DEFAULT_MODE: from Python 3.12 on, its widgets would be mounted before any screen
        # is on the stack
        await self.switch_mode("balance" if self._replayed else "monitor")
        if self._replayed:
            self.replay(*self._replayed)
        loop = self._started_on = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            try:
                loop.add_signal_handler(number, self.exit, 128 + number)
            except (ValueError, RuntimeError, NotImplementedError):
                break  # not the main thread: the caller handles signals
        if self.ignored_settings:
            self.show_message(self.ignored_settings, severity="warning")
        self.publisher.start(lambda snapshot: self.post_message(Sampled(snapshot)))
        if self._first_start:
            self.action_welcome()
        if not gc.isenabled():  # started on a terminal, not within a test
            self.call_after_refresh(_tune_garbage_collection)

    def switch_mode(self, mode: str) -> AwaitMount:
        """Switch to another screen.

        If the screen is new, the stylesheet is applied to it once; Textual would apply it twice.
        """
        self._makes_screen = mode not in self._screen_stacks
        made = super().switch_mode(mode)
        if self._makes_screen:
            self.screen._css_update_count = self._css_update_count
        self._makes_screen = False
        return made

    def refresh_css(self, animate: bool = True) -> None:
        """Apply the stylesheet to all widgets.

        Does nothing while `switch_mode` creates a screen, which gets the stylesheet anyway.
        """
        if not self._makes_screen:
            super().refresh_css(animate)

    async def on_event(self, event: Event) -> None:
        """Handle a key press completely before the next one.

        Textual would only queue it, and what the user types right after it could end up in the
        wrong field.
        """
        # Textual passes a key through the widgets first, and runs the binding of a key such as Tab
        # or Ctrl-U only when the widgets haven't handled the key. By then, text typed right after
        # the key would already be in the previous field, or would be deleted.
        if not isinstance(event, Key) or event.is_forwarded:
            await super().on_event(event)
            return
        self.app_focus = True
        field = self.focused
        if isinstance(field, Input) and event.is_printable:
            field.replace(event.character or "", *field.selection)
        elif not (
            await self._check_bindings(event.key, priority=True)
            or await self._check_bindings(event.key)
        ):
            await super().on_event(event)

    def hang_up(self) -> None:
        """Exit with the exit code of SIGHUP, because the terminal was closed.

        This method is thread-safe.
        """
        if self._started_on is not None:
            self._started_on.call_soon_threadsafe(self.exit, 128 + signal.SIGHUP)

    async def on_unmount(self) -> None:
        """Stop the threads without blocking the event loop."""
        await asyncio.to_thread(self.close_threads)

    async def action_leave(self) -> None:
        """Quit, after a confirmation if a search is running."""
        from .screens.dialogs import confirm

        if not self.is_searching:
            self.exit()
            return
        question = (
            "A search is running. Quit? Its measurements are kept, and the run can be resumed."
        )
        confirm(self, "Quit", question, self.exit)

    def action_show(self, name: str) -> None:
        """Switch to the screen called `name`, unless a dialog is open."""
        if name != self.current_mode and not isinstance(self.screen, ModalScreen):
            self.switch_mode(name)

    def action_welcome(self) -> None:
        """Open the dialog that is shown at the first start."""
        from .screens.welcome import WelcomeDialog

        if not isinstance(self.screen, ModalScreen):
            self.push_screen(WelcomeDialog(), self._open_choice)

    def _open_choice(self, key: str | None) -> None:
        """Open the screen or the demo that was chosen in the welcome dialog."""
        if key == "b":
            self.action_show("balance")
        elif key == "w":
            snapshot = self.snapshot
            trains = snapshot is not None and bool(snapshot.reports)
            self.action_show("trainings" if trains else "monitor")
        elif key == "d":
            self.wants_demo = True
            self.exit()

    def closing_lines(self, width: int | None) -> list[str]:
        """Return the lines to print after the app has closed, wrapped at `width` columns if given.

        They describe the last search and the training run that was started in this app.
        """
        from .text.closing import closing_lines

        path = self.written_plans.get(self.last_run, "")
        lines = closing_lines(self.last_run, path, width) if self.last_run else []
        if self.training is not None:
            lines += self.training.closing_lines()
        return lines

    def get_key_display(self, binding: Binding) -> str:
        """Return the name of a key as evener writes it, such as Ctrl-P, Shift-Tab or Enter."""
        shown = super().get_key_display(binding)
        if shown.startswith("^") and len(shown) > 1:
            return f"Ctrl-{shown[1:].upper()}"
        if shown.startswith("shift+"):
            return f"Shift-{shown.removeprefix('shift+').capitalize()}"
        return shown.capitalize() if shown in SPELLED_KEYS else shown

    def action_help(self) -> None:
        """Show the key bindings, and what the marks on the screens mean."""
        from .screens.dialogs import DetailsDialog, help_lines

        if not isinstance(self.screen, ModalScreen):
            notes = self.snapshot.notes if self.snapshot is not None else ()
            self.push_screen(DetailsDialog("Help", lambda width: help_lines(notes, width)))

    def action_command_palette(self) -> None:
        """Open the command palette, unless a dialog is open."""
        from textual.command import CommandPalette

        if not isinstance(self.screen, ModalScreen):
            hint = "Search commands, settings, runs"
            self.push_screen(CommandPalette(placeholder=hint, id="--command-palette"))

    def action_settings(self, first: str = "") -> None:
        """Open the settings dialog at the setting labelled `first`."""
        from .screens.settings_dialog import SettingsDialog

        if not isinstance(self.screen, ModalScreen):
            self.push_screen(SettingsDialog(first))

    def apply_settings(self) -> None:
        """Apply all settings, including the theme."""
        super().apply_settings()
        self.theme = f"evener-{self.settings.theme}"

    def action_switch_theme(self) -> None:
        """Switch to the next of evener's three themes, and save the choice."""
        names = get_args(ThemeName)
        now = self.theme.removeprefix("evener-")
        place = names.index(now) if now in names else -1
        self.change_settings(theme=names[(place + 1) % len(names)])
        self.theme = f"evener-{self.settings.theme}"

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the commands that the palette offers on every screen."""
        for name, title in SCREENS.items():
            yield SystemCommand(
                f"Show {title}", f"The {title} screen", lambda name=name: self.action_show(name)
            )
        yield SystemCommand("Next theme", "Dark, light, or high contrast", self.action_switch_theme)
        yield SystemCommand("Theme", "Choose among all themes", self.action_change_theme)
        yield SystemCommand(
            "First steps", "Where to begin, as at the first start", self.action_welcome
        )
        yield SystemCommand("Settings", "All of them, on a page", self.action_settings)
        yield SystemCommand("Help", "Keys, and what the marks mean", self.action_help)
        if not self.readonly:
            yield SystemCommand(
                "Save a picture", "The screen as an SVG file", self.action_screenshot
            )
        yield SystemCommand("Quit", "Leave evener", self.action_leave)

    def _handle_exception(self, error: Exception) -> None:
        """Write a crash log and exit, instead of printing the traceback over the screen."""
        # `tui.start` prints the file's path after restoring the terminal
        self.crash_log = self.crash_log or write_crash_log(error)
        super()._handle_exception(error)
        self._exit_renderables.clear()


def _tune_garbage_collection() -> None:
    """Turn garbage collection on again, and exempt the objects that exist now from it."""
    # The objects that exist now are never scanned, because that would take 40 ms each time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    gc.enable()


# colours on a dark and a light background for the tones of `view.cells` that Textual lacks
_TONE_COLOURS = {
    "dim": ("#76839a", "#66717f"),
    "title": ("#93a1b8", "#4d5866"),
    "strong": ("#f2f6fc", "#0d1117"),
    "accent": ("#58b4f0", "#0b62c4"),
    "memory": ("#b794f4", "#7e3fc4"),
    "power": ("#e5b567", "#9a5b00"),
    "speed": ("#5fd38d", "#15803d"),
    "heat": ("#41c7c0", "#0e7c7b"),
    "track": ("#2f3a4a", "#ccd3dc"),
    "frame": ("#2c3646", "#c3cbd6"),
    "frame-focus": ("#4f8cc9", "#0b62c4"),
    "cursor": ("#1f3147", "#d7e8fb"),
    "bar": ("#161d28", "#e6ebf2"),
    "device0": ("#6cb6ff", "#0b62c4"),
    "device1": ("#f0a45d", "#b35309"),
    "device2": ("#7bd88f", "#15803d"),
    "device3": ("#d2a8ff", "#7e3fc4"),
    "device4": ("#f47ba6", "#c0266b"),
    "device5": ("#56d4dd", "#0e7490"),
    "device6": ("#e6d16b", "#8a6a00"),
    "device7": ("#a5b4c8", "#556274"),
}
_BASE = {  # Textual's own variables
    "primary": ("#58b4f0", "#0b62c4"),
    "secondary": ("#b794f4", "#7e3fc4"),
    "accent": ("#5fd38d", "#15803d"),
    "success": ("#5fd38d", "#15803d"),
    "warning": ("#f0b450", "#9a5b00"),
    "error": ("#ff6b70", "#c4212b"),
    "foreground": ("#d3dbe7", "#1d2530"),
    "background": ("#0d1219", "#fbfcfe"),
    "surface": ("#0d1219", "#fbfcfe"),
    "panel": ("#161d28", "#e6ebf2"),
}


def theme_variables(*, dark: bool) -> dict[str, str]:
    """Return the `ev-` stylesheet variables: the colours of a dark or a light theme."""
    return {f"ev-{key}": colours[not dark] for key, colours in _TONE_COLOURS.items()}


def _theme(name: str, *, dark: bool) -> Theme:
    base: dict[str, Any] = {key: colours[not dark] for key, colours in _BASE.items()}
    return Theme(name, dark=dark, variables=theme_variables(dark=dark), **base)


def _contrast_theme() -> Theme:
    """Return the high-contrast theme: white on black, with brighter frames and labels."""
    bright = {
        "ev-dim": "#b8c0cc",
        "ev-title": "#d0d7e2",
        "ev-strong": "#ffffff",
        "ev-track": "#6b7686",
        "ev-frame": "#8a96a8",
        "ev-frame-focus": "#ffffff",
        "ev-cursor": "#004a99",
        "ev-bar": "#1c1c1c",
    }
    base: dict[str, Any] = {key: colours[0] for key, colours in _BASE.items()}
    base |= {"foreground": "#ffffff", "background": "#000000", "surface": "#000000"}
    return Theme(
        "evener-contrast", dark=True, variables={**theme_variables(dark=True), **bright}, **base
    )


DARK = _theme("evener-dark", dark=True)
LIGHT = _theme("evener-light", dark=False)
CONTRAST = _contrast_theme()
