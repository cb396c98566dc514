"""The Balance screen: a form, then the running search, then its verdict and the plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import ContentSwitcher

from evener.balancer.session_state import SessionState

from ..widgets.balance import BalanceView, LanePanel
from ..widgets.lists import Ticks
from .base import PanelScreen
from .dialogs import confirm
from .run_dialogs import RunActions, errors_file, plan_dialog
from .setup import Setup


class BalanceScreen(RunActions, PanelScreen):
    """Shows the app's session, which continues when another screen is opened."""

    NAME = "balance"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause(True)", "Pause"),
        Binding("p", "pause(False)", "Resume"),
        Binding("x", "stop", "Stop"),
        Binding("c", "go_on", "Continue"),
        Binding("e", "export", "Export"),
        Binding("w", "report", "Report"),
        Binding("t", "traceback", "Traceback"),
        Binding("n", "new", "New search"),
    ]

    @property
    def chosen_run(self) -> str:
        """The run of the session; empty without one."""
        return self.evener.balance.run

    def panels(self) -> Iterable[Widget]:
        """The form, and the search."""
        with ContentSwitcher(initial="setup", id="switch"):
            yield Setup(id="setup")
            yield BalanceView()

    def on_mount(self) -> None:
        """Follow the session."""
        self.watch(self.app, "balance", self._followed)
        self.watch(self.app, "snapshot", self._sampled, init=False)
        self.watch(self.app, "start_fault", self.query_one(Setup).complain, init=False)
        if self.evener.balance == SessionState():
            self.query_one("#pick-devices", Ticks).focus()

    def _followed(self, state: SessionState) -> None:
        shows_search = state != SessionState()
        switch = self.query_one("#switch", ContentSwitcher)
        wanted = "balance" if shows_search else "setup"
        if switch.current != wanted:
            switch.current = wanted
            if shows_search:
                self.query_one(LanePanel).focus()
                self._sampled()
        if shows_search and self.is_current:
            self.query_one(BalanceView).take(state)
        self.refresh_bindings()

    def _sampled(self) -> None:
        """Update the device rows, and nothing else."""
        if self.is_current and self.evener.balance != SessionState():
            self.query_one(LanePanel).take_samples(self.evener.session_samples())

    def redraw(self) -> None:
        """Draw the current state of the session."""
        self.settle_frames()
        self._sampled()
        self.query_one(BalanceView).take(self.evener.balance)
        self.query_one(Setup).redraw()

    def on_resize(self) -> None:
        """Add or remove frames, by the new size."""
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the keys that have an effect now."""
        state = self.evener.balance
        if action in ("pause", "stop"):
            return state.active and state.finished is None and (action == "stop" or parameters[0] is not state.paused)
        if action in ("export", "report"):
            return state.finished is not None
        if action == "traceback":
            return bool(state.run or state.seen) and errors_file(state.run) is not None
        if action in ("new", "go_on"):
            return state.ended and bool(action == "new" or state.run)
        return True

    def action_pause(self, paused: bool) -> None:
        """Pause the search, or resume it."""
        self.evener.pause_session(paused)

    def action_stop(self) -> None:
        """End the search after asking; the best plan so far is kept."""
        question = "Stop the search? The best plan so far is kept."
        confirm(self.evener, "Stop", question, self.evener.stop_session)

    def action_export(self) -> None:
        """Write the plan to a file."""
        finished = self.evener.balance.finished
        if finished is not None:
            self.app.push_screen(plan_dialog(finished.plan))

    def action_new(self) -> None:
        """Return to the form."""
        self.evener.balance = SessionState()
        self.query_one("#pick-devices", Ticks).focus()
