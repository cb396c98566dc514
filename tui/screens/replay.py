"""The replay of a past run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import ClassVar

import msgspec
from textual.binding import Binding, BindingType
from textual.widget import Widget

from evener.balancer.events import Event
from evener.balancer.journal import Header
from evener.balancer.session_state import advance, first_state

from ..runtime.run_replay import RunReplay
from ..runtime.session_thread import SessionEnded, SessionReported, SessionThread
from ..widgets.balance import BalanceView
from .base import PanelScreen
from .run_dialogs import RunActions, errors_file


class ReplayScreen(RunActions, PanelScreen):
    """Plays a run's events on a thread of its own, faster than they were; closing the screen ends it."""

    NAME = "runs"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p,space", "pause(True)", "Pause"),
        Binding("p,space", "pause(False)", "Resume"),
        Binding("t", "traceback", "Traceback"),
        Binding("escape,b", "dismiss", "Back", key_display="esc"),
    ]

    def __init__(self, name: str, header: Header, events: Iterable[Event]) -> None:
        super().__init__()
        self.state = first_state(header.devices, header.workload, name)
        self._thread = SessionThread(lambda: RunReplay(events), self.post_message)

    @property
    def chosen_run(self) -> str:
        """The run that is replayed."""
        return self.state.run

    def panels(self) -> Iterable[Widget]:
        """The panels of the Balance screen."""
        yield BalanceView()

    def on_mount(self) -> None:
        """Start the replay."""
        self._thread.start()

    async def on_unmount(self) -> None:
        """End the thread with the screen."""
        await asyncio.to_thread(self._thread.close)

    def redraw(self) -> None:
        """Draw the current state."""
        self.settle_frames()
        self.query_one(BalanceView).take(self.state)

    def on_session_reported(self, message: SessionReported) -> None:
        """Apply the next event."""
        message.stop()
        self.state = advance(self.state, message.event)
        self._follow()

    def on_session_ended(self, message: SessionEnded) -> None:
        """The journal has ended, or its session failed."""
        message.stop()
        self.state = msgspec.structs.replace(self.state, ended=True, running=(), fault=message.fault)
        self.refresh_bindings()
        self._follow()

    def _follow(self) -> None:
        """Draw the state unless another screen is in front; coming back redraws this one."""
        if self.is_current:
            self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to pause or to resume, until the end, and the tracebacks if there are any."""
        if action == "traceback":
            return errors_file(self.chosen_run) is not None
        return action != "pause" or (not self.state.ended and parameters[0] is not self.state.paused)

    def action_pause(self, paused: bool) -> None:
        """Pause the replay, or resume it."""
        self.state = msgspec.structs.replace(self.state, paused=paused)
        self._thread.pause(paused)
        self.refresh_bindings()
        self.redraw()
