"""The Balance screen: a form for a new search, then the search and its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import ContentSwitcher

from evener.balancer.result.sentences import find_training_command, recommends_plan
from evener.balancer.session_state import SessionState

from ..view.cells import Line
from ..view.result_panel import KeyHint, everything_lines
from ..view.search_log import probe_lines
from ..widgets.balance import BalanceView, LogPanel, ResultPanel, SearchDevicePanel
from ..widgets.lists import Ticks
from .balance_form import BalanceForm
from .base import PanelScreen
from .dialogs import confirm
from .run_dialogs import RunActions, ask_to_train, errors_file, plan_dialog

NOT_IN_REPLAYS = ("stop", "go_on", "report")


class BalanceScreen(RunActions, PanelScreen):
    """The Balance screen: a form for a new search, or a search or replay and its result."""

    NAME = "balance"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause(True)", "Pause"),
        Binding("p", "pause(False)", "Resume"),
        Binding("x", "stop", "Stop"),
        Binding("c", "go_on", "Continue"),
        Binding("e", "export", "Write the plan"),
        Binding("g", "train_here", "Train with it here"),
        Binding("w", "report", "Report"),
        Binding("enter", "read_all", "Everything", key_display="Enter", show=False),
        Binding("t", "traceback", "Traceback"),
        Binding("n", "new", "New search"),
    ]

    @property
    def chosen_run(self) -> str:
        """The id of the run that is shown, or ""."""
        return self.evener.balance.run

    def panels(self) -> Iterable[Widget]:
        """Yield the form and the view of a search, only one of which is visible at a time."""
        with ContentSwitcher(initial="setup", id="switch"):
            yield BalanceForm(id="setup")
            yield BalanceView(self.result_keys)

    def on_mount(self) -> None:
        """Subscribe to the search and the device readings, and focus the list of models."""
        self.watch(self.app, "balance", self._search_changed)
        self.watch(self.app, "snapshot", self._sampled, init=False)
        self.watch(self.app, "start_fault", self.query_one(BalanceForm).complain, init=False)
        if self.evener.balance == SessionState():
            self.query_one("#pick-workload", Ticks).focus()

    def result_keys(self) -> list[KeyHint]:
        """Return the keys to show in the result panel, except those that have no effect now."""
        keys = [
            KeyHint("e", "write the plan"),
            KeyHint("g", "train with it here"),
            KeyHint("w", "report"),
            KeyHint("enter", "everything", "Enter"),
            KeyHint("n", "new search"),
        ]
        actions = ("export", "train_here", "report", "read_all", "new")
        return [
            key
            for key, action in zip(keys, actions, strict=True)
            if self.check_action(action, ()) is True
        ]

    def _search_changed(self, before: SessionState, state: SessionState) -> None:
        shows_search = state != SessionState()
        switch = self.query_one("#switch", ContentSwitcher)
        wanted = "balance" if shows_search else "setup"
        if switch.current != wanted:
            switch.current = wanted
            if shows_search:
                self.query_one(LogPanel).focus()
                self._sampled()
        if shows_search and self.is_current:
            self.query_one(BalanceView).set_data(state)
        if state.finished is not None and before.finished is None:
            self.query_one(ResultPanel).focus()
        self.refresh_bindings()

    def _sampled(self) -> None:
        """Update the devices of the search with a new reading."""
        if self.is_current and self.evener.balance != SessionState():
            self.query_one(SearchDevicePanel).set_data(samples=self.evener.session_samples())

    def redraw(self) -> None:
        """Redraw the form and the search."""
        self.fit_frames()
        self._sampled()
        self.query_one(BalanceView).set_data(self.evener.balance)
        self.query_one(BalanceForm).redraw()

    def on_resize(self) -> None:
        """Fit all panels into the new terminal size."""
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible in the current state of the search."""
        if self.evener.replays and action in NOT_IN_REPLAYS:
            return False
        if action in ("pause", "stop"):
            return self._is_measuring and parameters != (self.evener.balance.paused,)
        if action in ("new", "go_on"):
            return self._can_begin_again(action)
        if action in ("read_all", "export", "report", "train_here"):
            return self._has_usable_result(action)
        if action == "traceback":
            run = self.evener.balance.run
            return bool(run or self.evener.balance.seen) and errors_file(run) is not None
        return True

    @property
    def _is_measuring(self) -> bool:
        """Whether a search or replay is running and has no result yet."""
        state = self.evener.balance
        return state.active and state.finished is None

    def _can_begin_again(self, action: str) -> bool:
        """Return whether `action` is possible after a search or replay.

        The action "new" begins another search. Any other action continues the run that has ended.
        """
        state = self.evener.balance
        if self.evener.replays:
            return True
        return state.ended and (action == "new" or bool(state.run))

    def _has_usable_result(self, action: str) -> bool:
        """Return whether the search has a result that `action` can use."""
        finished = self.evener.balance.finished
        if finished is None:
            return False
        if action == "read_all":
            return True
        if self.evener.readonly or action != "train_here":
            return not self.evener.readonly
        has_script = bool(find_training_command(finished.plan, "plan.toml"))
        return recommends_plan(finished) and has_script

    def action_pause(self, paused: bool) -> None:
        """Pause or resume the search."""
        self.evener.pause_session(paused)

    def action_stop(self) -> None:
        """Stop the search after a confirmation. Its best plan so far is kept."""
        question = "Stop the search? The best plan so far is kept."
        confirm(self.evener, "Stop", question, self.evener.stop_session)

    def action_export(self) -> None:
        """Ask for a file name, and write the plan."""
        finished = self.evener.balance.finished
        if finished is not None:
            dialog = plan_dialog(self.evener, finished.plan, self.chosen_run, finished)
            self.app.push_screen(dialog)

    def action_train_here(self) -> None:
        """Ask for the command that trains with the plan, and then run it."""
        finished = self.evener.balance.finished
        if finished is not None:
            ask_to_train(self.evener, finished.plan, self.chosen_run)

    def action_read_all(self) -> None:
        """Open a dialog with all details of the result."""

        def draw(width: int) -> tuple[Line, ...]:
            state = self.evener.balance
            return everything_lines(state, width, self.evener.written_plans.get(state.run, ""))

        self.open_details("Result", draw, wide=True)

    def action_open_probe(self) -> None:
        """Open a dialog with the measurement under the cursor."""
        row = self.query_one(LogPanel).chosen
        if row is not None:
            self.open_details("Measurement", lambda width: probe_lines(row, width))

    def action_new(self) -> None:
        """Return to the form for a new search."""
        self.evener.forget_session()
        self.query_one("#pick-workload", Ticks).focus()
