"""The Balance screen: a form, then the search as it goes, then its verdict and the plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import ContentSwitcher

from evener.balancer.session_state import BalanceState
from evener.tui.screens.base import PanelScreen
from evener.tui.screens.dialogs import ConfirmDialog
from evener.tui.screens.export import ExportDialog
from evener.tui.screens.setup import Setup
from evener.tui.widgets.balance import BalanceView, LanePanel
from evener.tui.widgets.choices import Ticks


class BalanceScreen(PanelScreen):
    """Shows the app's session; leaving the screen leaves it running."""

    NAME = "balance"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("x", "stop", "Stop"),
        Binding("e", "export", "Export"),
        Binding("n", "new", "New search"),
    ]

    def panels(self) -> Iterable[Widget]:
        """The form, and the search."""
        with ContentSwitcher(initial="setup", id="switch"):
            yield Setup(id="setup")
            yield BalanceView()

    def on_mount(self) -> None:
        """Follow the session."""
        self.watch(self.app, "balance", self._followed)
        self.watch(self.app, "snapshot", self._sensed, init=False)
        if self.evener.balance == BalanceState():
            self.query_one("#pick-devices", Ticks).focus()

    def _followed(self, state: BalanceState) -> None:
        shows_search = state != BalanceState()
        switch = self.query_one("#switch", ContentSwitcher)
        wanted = "balance" if shows_search else "setup"
        if switch.current != wanted:
            switch.current = wanted
            self.refresh_bindings()
            if shows_search:
                self.query_one(LanePanel).focus()
                self._sensed()
        if shows_search and self.is_current:
            self.query_one(BalanceView).take(state)
        self.refresh_bindings()

    def _sensed(self) -> None:
        """What the devices tell goes into their rows, and nothing else is drawn again."""
        if self.is_current and self.evener.balance != BalanceState():
            self.query_one(LanePanel).sense(self.evener.session_samples())

    def redraw(self) -> None:
        """Draw the session as it is now."""
        self.settle_frames()
        self._sensed()
        self.query_one(BalanceView).take(self.evener.balance)
        self.query_one(Setup).redraw()

    def on_resize(self) -> None:
        """Frames come and go with the size."""
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that mean nothing now are not offered."""
        state = self.evener.balance
        if action in ("pause", "stop"):
            return state.active and state.finished is None
        if action == "export":
            return state.finished is not None
        if action == "new":
            return state.ended
        return True

    def on_setup_wanted(self, event: Setup.Wanted) -> None:
        """Start the search."""
        self.evener.start_session(event.request, event.devices)

    def action_pause(self) -> None:
        """Hold the search, or let it go on."""
        self.evener.pause_session(not self.evener.balance.paused)

    def action_stop(self) -> None:
        """End the search after asking; the best plan so far is kept."""
        question = "Stop the search? The best plan so far is kept."
        self.app.push_screen(ConfirmDialog("Stop", question, "Stop"), self._stop)

    def _stop(self, confirmed: bool | None) -> None:
        if confirmed:
            self.evener.stop_session()

    def action_export(self) -> None:
        """Write the plan to a file."""
        finished = self.evener.balance.finished
        if finished is not None:
            self.app.push_screen(ExportDialog(finished.plan))

    def action_new(self) -> None:
        """Back to the form."""
        self.evener.balance = msgspec.structs.replace(BalanceState())
        self.query_one("#pick-devices", Ticks).focus()
