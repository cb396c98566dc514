"""The state that all screens share: device readings, the search, settings and alerts."""

from __future__ import annotations

import itertools
import os
import platform
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import msgspec
from textual.app import App
from textual.message import Message
from textual.message_pump import MessagePump
from textual.reactive import var
from textual.scrollbar import ScrollBar, ScrollBarRender

from evener.balancer.events import Event, EventThread, ProbeProgress
from evener.balancer.journal import JournalContents, ObservationEntry
from evener.balancer.request import Request
from evener.balancer.session_state import SessionState, advance, first_state, own_speed
from evener.devices.sampler import Sampler
from evener.devices.types import Device, DeviceSample, Snapshot
from evener.errors import EvenerError, RequestError
from evener.printable import plain
from evener.system.files import make_private

from .alert_command import start_command
from .local_training import LocalTraining
from .settings import Settings, save_settings
from .view.alerts import Alert, AlertRules, AlertWatch
from .view.cells import to_ascii

Post = Callable[[Message], object]
KEPT_ALERTS = 200
JOIN_SECONDS = 30.0  # a session that hangs must not block the terminal forever
_SERIALS = itertools.count(1)


@dataclass
class SessionReported(Message):
    """Posted when the session with the id `source` has reported an event.

    The app ignores events of earlier sessions, which arrive too late.
    """

    source: int
    event: Event

    def can_replace(self, message: Message) -> bool:
        """Return whether `message` reports newer progress of the same probe.

        If so, this message needn't be handled.
        """
        return (
            isinstance(message, SessionReported)
            and isinstance(message.event, ProbeProgress)
            and isinstance(self.event, ProbeProgress)
            and message.source == self.source
            and message.event.probe == self.event.probe
        )


@dataclass
class SessionEnded(Message):
    """Posted when the session with the id `source` has ended.

    `fault` and `remedy` say why it failed, and what to do about it. Both are "" after success.
    """

    source: int
    fault: str = ""
    remedy: str = ""


class SessionThread:
    """Runs a search or a replay in a thread, and posts its events as messages.

    `session_maker` is called in that thread and creates the session. `post` must be thread-safe.
    """

    def __init__(self, session_maker: Callable[[], EventThread], post: Post) -> None:
        self.source = next(_SERIALS)
        self._make = session_maker
        self._post = post
        self._session: EventThread | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-session", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the session to stop, and return at once."""
        self._stopping.set()
        if self._session is not None:
            self._session.stop()

    def pause(self, paused: bool) -> None:
        """Pause or resume the session."""
        if self._session is not None:
            (self._session.pause if paused else self._session.unpause)()

    def close(self) -> None:
        """Stop the session, and wait up to 30 seconds for its thread to end."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _report(self, event: Event) -> None:
        self._post(SessionReported(self.source, event))

    def _run(self) -> None:
        fault = remedy = ""
        try:
            with closing(self._make()) as self._session:
                if self._stopping.is_set():
                    self._session.stop()
                self._session.run(self._report)
        except EvenerError as error:
            fault = error.message
            remedy = error.remedy
        except (
            Exception
        ) as error:  # a bug becomes a message on the screen, with its traceback in a file
            fault = f"The session crashed: {error!r}."
            remedy = f"The traceback is in {write_crash_log(error)}."
        self._post(SessionEnded(self.source, fault, remedy))


def write_crash_log(error: BaseException) -> Path | None:
    """Write the traceback of `error` to a new file, and return its path.

    The file is in the user's state directory, or in the temporary directory if that one can't be
    written. Returns None if neither can be written.
    """
    import platformdirs

    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = f"evener on Python {platform.python_version()}, {platform.platform()}\n\n"
    text += "".join(traceback.format_exception(error))
    for folder in (
        Path(platformdirs.user_state_dir("evener")) / "crashes",
        Path(tempfile.gettempdir()),
    ):
        with suppress(OSError):
            make_private(folder)
            _write_new(folder / name, text)
            return folder / name
    return None


def _write_new(path: Path, text: str) -> None:
    """Create a file that only the user can read. Raises FileExistsError if it exists already."""
    # In a shared directory, an existing file could be another user's symbolic link.
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w"
    ) as stream:
        stream.write(text)


INTERVALS_SECONDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass
class Sampled(Message):
    """Posted when a new reading of the devices is available."""

    snapshot: Snapshot

    def can_replace(self, message: Message) -> bool:
        """Return whether `message` is a newer reading, so that this one needn't be handled."""
        return isinstance(message, Sampled)


def make_session(request: Request, **resume_arguments: Any) -> EventThread:
    """Create the session that runs a search or a comparison of layouts.

    To resume an earlier run, pass the keyword arguments of `open_run` as `resume_arguments`.
    """
    from evener.balancer.families import FAMILIES
    from evener.balancer.jobs import make_comparison_job
    from evener.balancer.run import begin, open_run
    from evener.balancer.session import Session

    if request.compare is not None and not resume_arguments:
        families = request.compare.families
        return Session(
            begin(make_comparison_job(request, None if families == tuple(FAMILIES) else families))
        )
    return Session(open_run(request, **resume_arguments))


class PlainScrollBar(ScrollBarRender):
    """A scroll bar of spaces, for terminals without block characters."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "] * 8
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "] * 8


class BaseApp(App[int]):
    """Base class of the app, with the state that screens and dialogs share.

    Screens watch three reactive attributes: `snapshot` (the last reading of the devices), `balance`
    (the state of the search or replay) and `start_fault` (why a search couldn't start).

    - `publisher`: the sampler that reads the devices.
    - `devices`: the device specification of new searches, such as "auto".
    - `trainable`: the devices that a search could use.
    - `readonly`: forbid searches, signals and changes to runs.
    - `ascii`: draw with ASCII characters only.
    - `session_maker`: creates sessions; tests replace it.
    - `settings_file`: where changed settings are saved; None doesn't save them.
    """

    # not `reactive`: that would redraw the whole screen at each tick
    snapshot: var[Snapshot | None] = var(None, always_update=True)
    balance: var[SessionState] = var(SessionState())
    start_fault: var[str] = var("", always_update=True)  # why the last session could not begin

    def __init__(
        self,
        publisher: Sampler,
        *,
        devices: str = "auto",
        trainable: tuple[Device, ...] = (),
        readonly: bool = False,
        ascii: bool = False,  # noqa: A002 - the option's name
        session_maker: Callable[..., EventThread] = make_session,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        settings_file: Path | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.settings_file = settings_file  # None: settings are not saved
        self.alert_watch = AlertWatch(self._alert_rules)
        self.alerts: deque[Alert] = deque(maxlen=KEPT_ALERTS)
        self.unread_alerts = 0
        self.publisher = publisher
        self.devices = devices
        self.trainable = trainable
        self.readonly = readonly
        # the font of the Linux console has neither braille nor most signs
        self.ascii = ascii or os.environ.get("TERM") == "linux"
        self._session_maker = session_maker
        self._session: SessionThread | None = None
        self.replays = False  # the session is a replay of an earlier run
        # the previous state, shown until the session has begun
        self._before: SessionState | None = None
        self._session_devices: tuple[Device, ...] = ()
        self.written_plans: dict[str, str] = {}  # path of each run's plan, by run id
        self.training: LocalTraining | None = None  # the last training that was started here
        self.last_run = ""  # id of the newest run of a search in this app
        self.set_class(self.ascii, "-ascii")
        ScrollBar.renderer = PlainScrollBar if self.ascii else ScrollBarRender

    def close_threads(self) -> None:
        """Stop the session and the sampler, and wait for their threads."""
        if self._session is not None:
            self._session.close()
        self.publisher.close()

    def to_drawable(self, text: str) -> str:
        """Return `text`, converted to ASCII characters if the app draws only those."""
        return to_ascii(text) if self.ascii else text

    def on_sampled(self, message: Sampled) -> None:
        """Publish a new reading of the devices, and raise the alerts that it triggers."""
        for alert in self.alert_watch.update(message.snapshot):
            self._show_alert(alert)
        self.snapshot = message.snapshot

    def _show_alert(self, alert: Alert) -> None:
        self.alerts.append(alert)
        self.unread_alerts += 1
        wanted = self.settings.alerts
        if wanted.bell:
            self.bell()
        fault = start_command(wanted.command, alert) if wanted.command else ""
        if fault:
            self.show_message(fault, severity="error")
        if self.current_mode != "monitor":
            self.show_message(alert.text, severity="warning")

    def change_settings(self, **changes: Any) -> None:
        """Change the settings with these field names, and save them.

        If they can't be saved, the error is shown as a message.
        """
        settings = msgspec.structs.replace(self.settings, **changes)
        if settings == self.settings:
            return
        self.settings = settings
        if self.settings_file is not None:
            with self.showing_errors():
                save_settings(self.settings_file, settings)

    def apply_settings(self) -> None:
        """Apply the settings for the sampling interval and for alerts."""
        self.publisher.interval_seconds = self.settings.interval_seconds
        self.alert_watch.rules = self._alert_rules

    @property
    def _alert_rules(self) -> AlertRules:
        alerts = self.settings.alerts
        return AlertRules(alerts.throttled_percent, alerts.plan_percent)

    def start_session(
        self,
        request: Request,
        devices: tuple[Device, ...],
        measurements: Sequence[ObservationEntry] = (),
        **resume_arguments: Any,
    ) -> None:
        """Start a search on `devices`, unless one is running or the app is read-only.

        To resume an earlier run, pass its `measurements`, and the keyword arguments of `open_run`
        as `resume_arguments`.
        """
        if self.readonly:
            self.show_message("This app is read-only: it starts no search.", severity="warning")
        elif not self.is_searching:
            state = first_state(devices, request.workload or "", previous=measurements)
            self._before = self.balance
            self._replace_session(
                lambda: self._session_maker(request, **resume_arguments), state, devices
            )

    def replay(self, record: JournalContents, speed: float = 8.0) -> None:
        """Replay a recorded run `speed` times as fast as it ran.

        If a search is running, this only shows a warning.
        """
        from evener.balancer.store.runs import EventReplay, recorded_events

        if self.is_searching:
            self.show_message(
                "A search is running here: stop it to replay a run.", severity="warning"
            )
            return
        header = record.header
        self._before = None
        state = first_state(header.devices, header.workload, header.run)
        self._replace_session(lambda: EventReplay(recorded_events(record), speed=speed), state)

    def _replace_session(
        self,
        session_maker: Callable[[], EventThread],
        state: SessionState,
        devices: tuple[Device, ...] | None = None,
    ) -> None:
        """Stop the current session and start another one; `devices` is None for a replay."""
        self.forget_session()
        self._session = SessionThread(session_maker, self.post_message)
        self._session_devices = devices or ()
        self.balance = state
        self.replays = devices is None
        self._session.start()

    def forget_session(self) -> None:
        """Stop the session and clear its state, so that the search form is shown again."""
        if self._session is not None:
            self._session.stop()
        self._session = None
        self.balance = SessionState()
        self.replays = False

    @property
    def is_searching(self) -> bool:
        """Whether a search is running. A replay doesn't count as one."""
        return self.balance.active and not self.replays

    def pause_session(self, paused: bool) -> None:
        """Pause or resume the running session."""
        if self._session is not None and self.balance.active:
            self._session.pause(paused)
            self.balance = msgspec.structs.replace(self.balance, paused=paused)

    def stop_session(self) -> None:
        """Ask the running session to stop. A search keeps its best result so far."""
        if self._session is not None and self.balance.active:
            self.balance = msgspec.structs.replace(self.balance, stopping=True, paused=False)
            self._session.stop()

    def on_session_reported(self, message: SessionReported) -> None:
        """Update the state of the search with an event of the current session."""
        if self._session is not None and message.source == self._session.source:
            self._before = None
            self.balance = advance(self.balance, message.event)
            if not self.replays:
                self.last_run = self.balance.run
            self._publish_loads()

    def on_session_ended(self, message: SessionEnded) -> None:
        """Store the result or error of the session, and show it as a message if no screen shows it.

        If a search failed before its first event, the Balance screen goes back to what it showed
        before the search.
        """
        if self._session is None or message.source != self._session.source:
            return
        fault = f"{message.fault} {message.remedy}" if message.fault else ""
        has_started = self._before is None or not fault
        if not has_started:
            self.balance = self._before or SessionState()
        else:
            self.balance = msgspec.structs.replace(
                self.balance,
                running=(),
                ended=True,
                stopping=False,
                fault=message.fault,
                remedy=message.remedy,
            )
        self._publish_loads()
        in_form = self.balance == SessionState()
        if in_form:
            self.start_fault = fault
        shown = self.current_mode == "balance" and (has_started or in_form)
        if not self.replays and not shown:
            self._show_end(fault)

    def _show_end(self, fault: str) -> None:
        """Show a message with the error or, if there is none, the first line of the result."""
        if fault:
            self.show_message(fault, severity="error")
        elif self.balance.finished is not None:
            answer = self.balance.finished.verdict.partition("\n")[0]
            self.show_message(f"The search ended. {answer}")

    def _publish_loads(self) -> None:
        """Pass the load of running probes to simulated devices, so that the monitor shows it."""
        loads: dict[str, tuple[float | None, int]] = {}
        for running in self.balance.running:
            trains = running.phase in ("warming up", "measuring")
            for position in running.probe.layout.active:
                if not trains or position >= len(self._session_devices):
                    continue
                share = running.probe.layout.pass_rows[position]
                known = running.samples_per_second is not None
                rate = own_speed(running, position) if known else None
                loads[self._session_devices[position].id] = rate, share
        self.publisher.set_loads(loads)

    def session_samples(self) -> tuple[DeviceSample | None, ...]:
        """Return the latest reading of each device of the search, or None for those without one."""
        seen = (
            {sample.device.key: sample for sample in self.snapshot.devices}
            if self.snapshot is not None
            else {}
        )
        return tuple(seen.get(device.key) for device in self._session_devices)

    def start_training(self, arguments: Sequence[str], log: Path) -> None:
        """Start `evener` with `arguments` as a training run whose output goes to `log`.

        Raises RequestError if a training run that was started here is still running, or if the log
        can't be written.
        """
        if self.training is not None and self.training.is_running:
            raise RequestError(
                f"A training is already running here: {self.training.command}.",
                "Stop it on the Trainings screen, or start this one in another terminal.",
            )
        self.training = LocalTraining(arguments, log)

    def change_interval(self, direction: int) -> None:
        """Change the sampling interval to the next longer (1) or shorter (-1) one, and save it."""
        steps = sorted({*INTERVALS_SECONDS, self.publisher.interval_seconds})
        place = steps.index(self.publisher.interval_seconds) + direction
        seconds = steps[max(0, min(place, len(steps) - 1))]
        self.publisher.interval_seconds = seconds
        self.change_settings(interval_seconds=seconds)

    @contextmanager
    def showing_errors(self) -> Iterator[None]:
        """Context manager: show an EvenerError as a message instead of raising it."""
        try:
            yield
        except EvenerError as fault:
            self.show_message(str(fault), severity="error")

    def show_message(
        self, text: str, *, severity: Literal["information", "warning", "error"] = "information"
    ) -> None:
        """Show a notification of plain text, without markup or control characters."""
        self.notify(plain(text), severity=severity, markup=False)


class UsesApp(MessagePump):
    """Mixin for screens and widgets that use the state of `BaseApp`."""

    @property
    def evener(self) -> BaseApp:
        """The running app, typed as `BaseApp`."""
        return cast(BaseApp, self.app)
