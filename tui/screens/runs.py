"""The Runs screen: the list of past runs, and the plans of one or two runs side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from evener.balancer.result.sentences import find_training_command
from evener.balancer.session_state import SessionState
from evener.balancer.store import runs
from evener.balancer.store.runs import RunSummary, StoredRun, read_run
from evener.errors import EvenerError

from ..text.summaries import training_report
from ..view.cells import Line, fit_rows, text_lines
from ..view.run_differences import difference_lines
from ..view.runs import RUN_COLUMNS, has_failed, plan_lines, run_page, run_search_text
from ..view.table import Grid, Order
from ..view.teaching import NO_RUN
from ..widgets.lines import Lines
from ..widgets.lists import SortedPanel
from .base import SortedScreen
from .dialogs import confirm
from .run_dialogs import RunActions, ask_to_train, errors_file, plan_dialog


class RunPanel(SortedPanel[RunSummary]):
    """The panel with a row for each run; marked runs are compared."""

    COLUMNS = RUN_COLUMNS
    OPEN = "screen.read_all"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "tag", "Compare", key_display="Space"),
    ]

    def __init__(self) -> None:
        super().__init__("Runs", id="runs", order=Order("run"))

    def identity(self, row: RunSummary) -> str:
        """Return the run's id."""
        return row.run

    def search_text_of(self, row: RunSummary) -> str:
        """Return the text of a row that the filter searches for the user's words."""
        return run_search_text(row)

    def set_data(self, found: Sequence[RunSummary]) -> None:
        """Show these runs, and remove the marks of runs that have disappeared."""
        self.tagged &= {summary.run for summary in found}
        super().set_data(found)

    def grid(self) -> Grid[RunSummary]:
        """Return the table of runs, with a message if it is empty."""
        return Grid(RUN_COLUMNS, "No run matches." if self.words else NO_RUN)


class RunsScreen(RunActions, SortedScreen):
    """The screen with the past runs.

    The runs' journals are read when the screen is opened, when a session has started or ended,
    and on F5.
    """

    NAME = "runs"
    FILTERED = "id, devices, workload or state"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "go_on", "Continue"),
        Binding("r", "replay", "Replay"),
        Binding("e", "export", "Plan"),
        Binding("g", "train_here", "Train"),
        Binding("w", "report", "Report"),
        Binding("d,delete", "delete", "Delete"),
        Binding("t", "traceback", "Traceback"),
        Binding("f5", "reload", "Reload", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[str, StoredRun] = {}

    @property
    def chosen_run(self) -> str:
        """The id of the run under the cursor; "" if there is none."""
        chosen = self.query_one(RunPanel).chosen
        return chosen.run if chosen is not None else ""

    def panels(self) -> Iterable[Widget]:
        """Yield the panels: the list, the differences, one or two plans, and the filter's field."""
        yield RunPanel()
        yield Lines("Differences", id="differences", classes="panel")
        with Horizontal(id="plans"):
            yield Lines(id="left", classes="panel")
            yield Lines(id="right", classes="panel")
        yield self.filter_field()

    def on_mount(self) -> None:
        """Focus the list, and watch the session to reload the list when it starts or ends."""
        self.query_one(RunPanel).focus()
        self.watch(self.app, "balance", self._followed, init=False)

    async def _followed(self, before: SessionState, state: SessionState) -> None:
        """Reload the list of runs when the session starts or ends."""
        if self.is_current and (before.run, before.ended) != (state.run, state.ended):
            await self.action_reload()

    async def on_screen_resume(self) -> None:
        """Reload the list when the screen is shown again, because there may be new runs."""
        await self.action_reload()

    async def go_to(self, name: str) -> None:
        """Move the cursor to the run `name`, and remove a filter that hides the run."""
        await self.action_reload()
        panel = self.query_one(RunPanel)
        if name not in [panel.identity(row) for row in panel.rows]:
            self.action_end_filter()
        names = [panel.identity(row) for row in panel.rows]
        if name in names:
            panel.action_move(names.index(name) - panel.cursor)

    async def action_reload(self) -> None:
        """Read the list of runs again."""
        with self.evener.showing_errors():
            found = await asyncio.to_thread(runs.list_runs)
            self._plans.clear()
            self.query_one(RunPanel).set_data(found)
            self.redraw()

    def redraw(self) -> None:
        """Draw the list, and the plans of the chosen runs."""
        self.fit_frames()
        panel = self.query_one(RunPanel)
        around = 2 if self.has_class("-bare") else 4
        room = self.app.size.height - 2
        without_runs = not panel.found
        listed = max(3, min(panel.count + around, room * 2 // 5))
        panel.styles.height = room if without_runs else listed
        self.query_one("#plans").display = not without_runs
        panel.redraw()
        self._draw_plans()
        self.refresh_bindings()

    def on_list_panel_moved(self) -> None:
        """Draw the plan of the run under the cursor."""
        self._draw_plans()
        self.refresh_bindings()

    def _draw_plans(self) -> None:
        """Draw the chosen run's plan, to the right of a marked run's."""
        panel = self.query_one(RunPanel)
        chosen = self.chosen_run
        others = [name for row in panel.chosen_rows if (name := panel.identity(row)) != chosen]
        left, right = self.query_one("#left", Lines), self.query_one("#right", Lines)
        right.display = bool(others)
        self._draw_differences(others[0] if others else "", chosen)
        left.entitle("Compared with" if others else "Plan")
        right.entitle("Plan")
        left.show(self._plan_lines(others[0] if others else chosen, *left.size))
        if others:
            right.show(self._plan_lines(chosen, *right.size))

    def _draw_differences(self, before: str, after: str) -> None:
        """Draw how two runs differ; hide the panel unless both are searches."""
        panel = self.query_one("#differences", Lines)
        lines: tuple[Line, ...] = ()
        with suppress(EvenerError):
            if before and not any(map(runs.load_training, (before, after))):
                lines = difference_lines(
                    self._load(before), self._load(after), self.app.size.width - 4
                )
        panel.display = bool(lines)
        panel.styles.height = len(lines) + (0 if self.has_class("-bare") else 2)
        panel.entitle("Differences")
        panel.show(lines)

    def _load(self, name: str) -> StoredRun:
        """Return a stored run, cached until the list is reloaded."""
        found = self._plans.get(name) or runs.load_run(name)
        self._plans[name] = found
        return found

    def _plan_lines(self, name: str, width: int, height: int) -> tuple[Line, ...]:
        """Return a search's plan, a training's journal, or a read error."""
        if not name:
            return ()
        try:
            training = runs.load_training(name)
            if training is not None:
                lines = tuple(
                    line
                    for text in training_report(training)
                    for line in text_lines(text, width, 3)
                )
            else:
                lines = plan_lines(self._load(name), width, height)
            return fit_rows(lines, height, "Enter reads everything")
        except EvenerError as fault:
            return text_lines(str(fault), width, 6, "bad")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable only the keys that have an effect on the run under the cursor."""
        if action not in (
            "go_on",
            "replay",
            "export",
            "train_here",
            "report",
            "delete",
            "traceback",
        ):
            return True
        chosen = next((panel.chosen for panel in self.query(RunPanel)), None)
        if chosen is not None and chosen.kind == "training" and action != "delete":
            return False
        if chosen is None or (self.evener.readonly and action not in ("replay", "traceback")):
            return False
        state, planned = chosen.state, chosen.probes > 0 and not has_failed(chosen)
        return {
            "go_on": state in ("finished", "stopped", "failed") and not self.evener.searches,
            "export": planned,
            "train_here": planned and self._has_script(chosen.run),
            "report": planned,
            "delete": state != "running",
            "traceback": errors_file(chosen.run) is not None,
        }.get(action, state != "unreadable")

    def _has_script(self, name: str) -> bool:
        """True if a command can train by the run's plan."""
        try:
            plan = self._load(name).plan
        except EvenerError:
            return False
        return plan is not None and bool(find_training_command(plan, "plan.toml"))

    def action_read_all(self) -> None:
        """Show all results of the run under the cursor, or the whole journal of a training."""
        name = self.chosen_run
        with self.evener.showing_errors():
            training = runs.load_training(name)
            if training is not None:
                texts = list(training_report(training))
                self.open_details(
                    "Training",
                    lambda width: tuple(
                        row for text in texts for row in text_lines(text, width, 6)
                    ),
                    wide=True,
                )
                return
            found, path = self._load(name), self.evener.written_plans.get(name, "")
            self.open_details(name, lambda width: run_page(found, width, path), wide=True)

    def action_train_here(self) -> None:
        """Ask for the command that trains by the plan under the cursor, then start it."""
        name = self.chosen_run
        with self.evener.showing_errors():
            plan = self._load(name).require_plan()
            ask_to_train(self.evener, plan, name)

    def action_export(self) -> None:
        """Ask for a path, and write the plan of the run under the cursor to it."""
        with self.evener.showing_errors():
            name = self.chosen_run
            found = runs.load_run(name)
            dialog = plan_dialog(self.evener, found.require_plan(), name, found.end)
            self.app.push_screen(dialog)

    def action_replay(self) -> None:
        """Replay the run under the cursor on the Balance screen."""
        name = self.chosen_run
        if not name:
            return
        with self.evener.showing_errors():
            self.evener.replay(read_run(name))
            self.app.switch_mode("balance")

    def action_delete(self) -> None:
        """Delete the marked runs, or the run under the cursor, after a confirmation."""
        names = [row.run for row in self.query_one(RunPanel).chosen_rows]
        what = (
            f"the run {names[0]} and its journal"
            if len(names) == 1
            else f"{len(names)} runs and their journals"
        )
        question = f"Delete {what}? This can't be undone."
        confirm(self.evener, "Delete", question, lambda: self._delete(names))

    async def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self.evener.showing_errors():
                runs.delete_run(name)
        await self.action_reload()
