"""The Runs screen: stored runs, their plans, and a comparison of two."""

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
    """Table of the stored runs."""

    COLUMNS = RUN_COLUMNS
    OPEN = "screen.read_all"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "tag", "Compare", key_display="Space"),
    ]

    def __init__(self) -> None:
        super().__init__("Runs", id="runs", order=Order("run"))

    def identity(self, row: RunSummary) -> str:
        """Return the id of the run."""
        return row.run

    def search_text_of(self, row: RunSummary) -> str:
        """Return the text that the filter searches."""
        return run_search_text(row)

    def set_data(self, rows: Sequence[RunSummary]) -> None:
        """Set the runs. Those that were marked before stay marked."""
        self.tagged &= {summary.run for summary in rows}
        super().set_data(rows)

    def grid(self) -> Grid[RunSummary]:
        """Return the column definitions, and the text to show if the table is empty."""
        return Grid(RUN_COLUMNS, "No run matches." if self.words else NO_RUN)


class RunsScreen(RunActions, SortedScreen):
    """The Runs screen: a table of stored runs, and the plan of the run under the cursor.

    If a run is marked, the screen also shows its plan and how both runs differ.
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
        """The id of the run under the cursor, or ""."""
        chosen = self.query_one(RunPanel).chosen
        return chosen.run if chosen is not None else ""

    def panels(self) -> Iterable[Widget]:
        """Yield the table, the differences, the plans of two runs, and the filter."""
        yield RunPanel()
        yield Lines("Differences", id="differences", classes="panel")
        with Horizontal(id="plans"):
            yield Lines(id="left", classes="panel")
            yield Lines(id="right", classes="panel")
        yield self.filter_field()

    def on_mount(self) -> None:
        """Focus the table, and subscribe to the search."""
        self.query_one(RunPanel).focus()
        self.watch(self.app, "balance", self._search_changed, init=False)

    async def _search_changed(self, before: SessionState, state: SessionState) -> None:
        """Reload the list of runs when a search begins or ends."""
        if self.is_current and (before.run, before.ended) != (state.run, state.ended):
            await self.action_reload()

    async def on_screen_resume(self) -> None:
        """Reload the runs when the user comes back to the screen."""
        await self.action_reload()

    async def go_to(self, name: str) -> None:
        """Reload the runs, and move the cursor to the run with the id `name`.

        Clears the filter if it hides that run.
        """
        await self.action_reload()
        panel = self.query_one(RunPanel)
        if name not in [panel.identity(row) for row in panel.rows]:
            self.action_end_filter()
        names = [panel.identity(row) for row in panel.rows]
        if name in names:
            panel.action_move(names.index(name) - panel.cursor)

    async def action_reload(self) -> None:
        """Read the runs from disk again."""
        with self.evener.showing_errors():
            found = await asyncio.to_thread(runs.list_runs)
            self._plans.clear()
            self.query_one(RunPanel).set_data(found)
            self.redraw()

    def redraw(self) -> None:
        """Divide the height between the panels, and draw the table and the plans."""
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
        """Show the plan of the run under the cursor."""
        self._draw_plans()
        self.refresh_bindings()

    def _draw_plans(self) -> None:
        """Draw the plan of the run under the cursor and, if another run is marked, its plan too."""
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
        """Show how two searches differ. Hides the panel for training runs and for a single run."""
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
        """Load a stored run from disk, or from the cache that a reload clears."""
        found = self._plans.get(name) or runs.load_run(name)
        self._plans[name] = found
        return found

    def _plan_lines(self, name: str, width: int, height: int) -> tuple[Line, ...]:
        """Return the lines about a run that fit into the panel, or why the run can't be read."""
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
        """Return whether an action is possible with the run under the cursor."""
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
            "go_on": state in ("finished", "stopped", "failed") and not self.evener.is_searching,
            "export": planned,
            "train_here": planned and self._has_script(chosen.run),
            "report": planned,
            "delete": state != "running",
            "traceback": errors_file(chosen.run) is not None,
        }.get(action, state != "unreadable")

    def _has_script(self, name: str) -> bool:
        """Return whether the run's plan is for a script that `evener launch` can start."""
        try:
            plan = self._load(name).plan
        except EvenerError:
            return False
        return plan is not None and bool(find_training_command(plan, "plan.toml"))

    def action_read_all(self) -> None:
        """Open a dialog with all details of the run under the cursor."""
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
        """Ask for the command that trains with the run's plan, and then run it."""
        name = self.chosen_run
        with self.evener.showing_errors():
            plan = self._load(name).require_plan()
            ask_to_train(self.evener, plan, name)

    def action_export(self) -> None:
        """Ask for a file name, and write the run's plan."""
        with self.evener.showing_errors():
            name = self.chosen_run
            found = runs.load_run(name)
            dialog = plan_dialog(self.evener, found.require_plan(), name, found.end)
            self.app.push_screen(dialog)

    def action_replay(self) -> None:
        """Replay the run under the cursor, and switch to the Balance screen."""
        name = self.chosen_run
        if not name:
            return
        with self.evener.showing_errors():
            self.evener.replay(read_run(name))
            self.app.switch_mode("balance")

    def action_delete(self) -> None:
        """Delete the marked runs, or the one under the cursor, after a confirmation."""
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
