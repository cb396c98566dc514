"""The full-screen app: wiring between threads, screens and keys. It decides nothing about devices or balancing."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.reactive import var
from textual.screen import ModalScreen, Screen

from evener.balancer.request import Request
from evener.balancer.session_state import BalanceState, advance, own_speed
from evener.devices.types import Device, DeviceSample, Snapshot
from evener.errors import RequestError
from evener.tui.app.terminal_watch import HangUpWatch
from evener.tui.app.theme import DARK, DARK_MEANINGS, LIGHT
from evener.tui.runtime.crash_log import write_crash_log
from evener.tui.runtime.messages import Sampled, SessionEnded, SessionReported
from evener.tui.runtime.session_thread import Live, SessionThread
from evener.tui.runtime.snapshot_publisher import Feed, Load, open_feed
from evener.tui.view.cells import clean
from evener.tui.view.marks import ASCII, UNICODE, Marks
from evener.tui.widgets.bars import SCREENS

INTERVALS_SECONDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
CRASH_EXIT_CODE = 70


def _monitor() -> Screen[None]:
    from evener.tui.screens.monitor import MonitorScreen

    return MonitorScreen()


def _balance() -> Screen[None]:
    from evener.tui.screens.balance import BalanceScreen

    return BalanceScreen()


def _runs() -> Screen[None]:
    from evener.tui.screens.runs import RunsScreen

    return RunsScreen()


def make_session(request: Request) -> Live:
    """A session of this request, on this machine."""
    from evener.balancer.session import Session

    return Session(request)


class EvenerApp(App[int]):
    """Three screens over one feed of snapshots and at most one session at a time."""

    TITLE = "evener"
    CSS_PATH = "app.tcss"
    MODES: ClassVar[dict[str, str | Callable[[], Screen[None]]]] = {
        "monitor": _monitor,
        "balance": _balance,
        "runs": _runs,
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "show('monitor')", "Monitor", show=False),
        Binding("2", "show('balance')", "Balance", show=False),
        Binding("3", "show('runs')", "Runs", show=False),
        Binding("question_mark,h,f1", "help", "Help", key_display="?"),
        Binding("T", "switch_looks", "Dark or light", show=False),
        Binding("q", "leave", "Quit"),
        Binding("ctrl+c", "quit", "Quit now", show=False),
    ]

    # not `reactive`: that would draw the whole screen again at each tick
    snapshot: var[Snapshot | None] = var(None, always_update=True)
    balance: var[BalanceState] = var(BalanceState())

    def __init__(
        self,
        feed: Feed,
        *,
        devices: str = "auto",
        known_devices: tuple[Device, ...] = (),
        workload: str | None = None,
        readonly: bool = False,
        ascii: bool = False,  # noqa: A002 - the option's name
        theme: str | None = None,
        session_maker: Callable[[Request], Live] = make_session,
    ) -> None:
        super().__init__()
        self.feed = feed
        self.devices = devices
        self.known_devices = known_devices
        self.workload = workload
        self.readonly = readonly
        self.marks: Marks = ASCII if ascii else UNICODE
        self.crash_log: Path | None = None
        self._session_maker = session_maker
        self._session: SessionThread | None = None
        self._session_devices: tuple[Device, ...] = ()
        self._started_on: asyncio.AbstractEventLoop | None = None
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = "evener-light" if theme == "light" else "evener-dark"
        self.set_class(ascii, "-ascii")

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """The colours with a meaning, for themes that know nothing of them."""
        return DARK_MEANINGS

    async def on_mount(self) -> None:
        """Open the Monitor, start sampling, and end in good order when asked to from outside."""
        # not by DEFAULT_MODE: from Python 3.12 on its widgets are mounted before any screen is on the stack
        await self.switch_mode("monitor")
        loop = self._started_on = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            try:
                loop.add_signal_handler(number, self.exit, 128 + number)
            except (ValueError, RuntimeError, NotImplementedError):
                break  # not in the main thread: whoever runs us there handles signals
        self.feed.start(self.post_message)

    def hang_up(self) -> None:
        """The terminal is gone: end as after SIGHUP; called from any thread."""
        if self._started_on is not None:
            self._started_on.call_soon_threadsafe(self.exit, 128 + signal.SIGHUP)

    def close_threads(self) -> None:
        """Stop the session and the feed, and wait for them; no probe child outlives this."""
        if self._session is not None:
            self._session.close()
        self.feed.stop()

    async def on_unmount(self) -> None:
        """Join every thread before the terminal goes back."""
        await asyncio.to_thread(self.close_threads)

    def on_sampled(self, message: Sampled) -> None:
        """Let the screens follow."""
        self.snapshot = message.snapshot

    def start_session(self, request: Request, devices: tuple[Device, ...]) -> None:
        """Begin a search, unless one is under way."""
        if self.balance.active:
            return
        self._session_devices = devices
        self._session = SessionThread(lambda: self._session_maker(request), self.post_message)
        names = tuple(device.name for device in devices)
        labels = tuple(device.label for device in devices)
        self.balance = BalanceState(devices=labels, names=names, workload=request.workload or "")
        self._session.start()

    def pause_session(self, paused: bool) -> None:
        """Hold the search, or let it go on."""
        if self._session is not None and self.balance.active:
            self._session.pause(paused)
            self.balance = msgspec.structs.replace(self.balance, paused=paused)

    def stop_session(self) -> None:
        """End the search with the best plan so far."""
        if self._session is not None and self.balance.active:
            self.balance = msgspec.structs.replace(self.balance, stopping=True, paused=False)
            self._session.stop()

    def on_session_reported(self, message: SessionReported) -> None:
        """Take in what the session reports."""
        if self._session is not None and message.source == self._session.source:
            self.balance = advance(self.balance, message.event)
            self._follow_probes()

    def on_session_ended(self, message: SessionEnded) -> None:
        """Take in that the session is over, and why."""
        if self._session is None or message.source != self._session.source:
            return
        self.balance = msgspec.structs.replace(
            self.balance, running=(), ended=True, stopping=False, fault=message.fault, remedy=message.remedy
        )
        self._follow_probes()
        if message.fault:
            self.say(f"{message.fault} {message.remedy}", severity="error")
        elif self.balance.finished is not None and self.current_mode != "balance":
            self.say(f"The search ended. {self.balance.finished.verdict}")

    def _follow_probes(self) -> None:
        """Tell the feed what the running probes do to each device."""
        loads: dict[str, Load] = {}
        for running in self.balance.running:
            for position in running.probe.layout.active:
                if running.samples_per_second is not None and position < len(self._session_devices):
                    share = running.probe.layout.shares[position]
                    loads[self._session_devices[position].id] = Load(own_speed(running, position), share)
        self.feed.follow(loads)

    def session_samples(self) -> tuple[DeviceSample | None, ...]:
        """The newest sample of each device of the session, None where the monitor doesn't see it."""
        seen = {sample.device.id: sample for sample in self.snapshot.devices} if self.snapshot is not None else {}
        return tuple(seen.get(device.id) for device in self._session_devices)

    def say(self, text: str, *, severity: Literal["information", "warning", "error"] = "information") -> None:
        """A message that goes away by itself; whatever is in the text, it is shown as plain text."""
        self.notify(clean(text), severity=severity, markup=False)

    async def action_leave(self) -> None:
        """Quit; while a search is under way, only after asking."""
        from evener.tui.screens.dialogs import ConfirmDialog

        if not self.balance.active:
            self.exit()
            return
        question = "A search is under way. Quit? Its journal keeps what was measured; it can be resumed."
        self.push_screen(ConfirmDialog("Quit", question, "Quit"), lambda yes: self.exit() if yes else None)

    def change_interval(self, direction: int) -> None:
        """Sample more (-1) or less (1) often, in steps."""
        steps = sorted({*INTERVALS_SECONDS, self.feed.interval_seconds})
        place = steps.index(self.feed.interval_seconds) + direction
        self.feed.interval_seconds = steps[max(0, min(place, len(steps) - 1))]

    def action_show(self, name: str) -> None:
        """Open one of the screens, unless a dialog waits for an answer; a replay goes on meanwhile."""
        if name != self.current_mode and not isinstance(self.screen, ModalScreen):
            self.switch_mode(name)

    def action_help(self) -> None:
        """Open the help page."""
        from evener.tui.screens.help import HelpDialog

        if not isinstance(self.screen, HelpDialog):
            self.push_screen(HelpDialog())

    def action_switch_looks(self) -> None:
        """Dark to light and back."""
        self.theme = "evener-light" if self.current_theme.dark else "evener-dark"

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the command palette offers besides the keys of the screen."""
        for name, title in SCREENS.items():
            yield SystemCommand(f"Show {title}", f"The {title} screen", lambda name=name: self.action_show(name))
        yield SystemCommand("Dark or light", "Turn the colours round", self.action_switch_looks)
        yield SystemCommand("Theme", "Choose among all themes", self.action_change_theme)
        yield SystemCommand("Help", "Keys, and what the marks mean", self.action_help)
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
    readonly: bool = False,
    ascii: bool = False,  # noqa: A002 - the option's name
    theme: str | None = None,
    replay: Path | None = None,
    workload: str | None = None,
    interval_seconds: float = 1.0,
) -> int:
    """Run the app on this terminal and return the exit code.

    RequestError and DeviceError (devices, replay file) are raised before the terminal is touched.
    """
    _check_theme(theme)
    feed, known = open_feed(devices, replay, interval_seconds)
    app = EvenerApp(
        feed,
        devices=devices,
        known_devices=known,
        workload=workload,
        readonly=readonly,
        ascii=ascii,
        theme=theme,
    )
    watch = HangUpWatch(app.hang_up, app.close_threads)
    watch.start()
    try:
        result = app.run()
    finally:
        app.close_threads()
        watch.stop()
    if app.crash_log is not None or app.return_code == 1:
        kept = f"the traceback is in {app.crash_log}" if app.crash_log else "its traceback could not be written"
        print(f"evener broke; {kept}.", file=sys.stderr)
        return CRASH_EXIT_CODE
    return result or 0


def _check_theme(theme: str | None) -> None:
    if theme not in (None, "dark", "light"):
        raise RequestError(f"--theme {theme!r} is not known.", "Choose dark or light; the app itself has more.")
