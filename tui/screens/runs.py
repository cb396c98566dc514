"""The Runs screen: past runs, their plans side by side, export, replay, deletion."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from evener.balancer.store import runs
from evener.balancer.store.runs import Run, RunSummary
from evener.errors import EvenerError
from evener.tui.runtime.run_replay import read_run, recorded_events
from evener.tui.screens.base import PanelScreen
from evener.tui.screens.dialogs import ConfirmDialog
from evener.tui.screens.export import ExportDialog
from evener.tui.screens.replay import ReplayScreen
from evener.tui.view.cells import Line, text_lines
from evener.tui.view.runs import plan_lines, run_lines
from evener.tui.view.table import Position
from evener.tui.widgets.lines import Lines
from evener.tui.widgets.lists import ListPanel


class RunPanel(ListPanel):
    """One row per run, the newest first."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "Replay", show=False)]

    def __init__(self) -> None:
        super().__init__("Runs", id="runs")
        self.runs: tuple[RunSummary, ...] = ()
        self.taken = ""

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self.runs)

    @property
    def chosen(self) -> str:
        """The run under the cursor; empty without one."""
        return self.runs[self.cursor].run if self.runs else ""

    def take(self, found: tuple[RunSummary, ...]) -> None:
        """Show these; the cursor stays on its run."""
        before = self.chosen
        self.runs = found
        names = [each.run for each in found]
        self.cursor = names.index(before) if before in names else max(0, min(self.cursor, len(names) - 1))
        self.taken = self.taken if self.taken in names else ""
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the rows."""
        position = Position(self.cursor, self.top)
        lines, self.top = run_lines(self.runs, self.taken, *self.size, self.evener.marks, position)
        self.entitle(subtitle=str(self.count))
        self.show(lines)


class RunsScreen(PanelScreen):
    """Reads the journals when it is opened, and on F5."""

    NAME = "runs"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "take", "Compare"),
        Binding("e", "export", "Export"),
        Binding("r", "replay", "Replay"),
        Binding("d,delete", "delete", "Delete"),
        Binding("f5", "reload", "Reload", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[str, Run | str] = {}

    def panels(self) -> Iterable[Widget]:
        """The list, and one or two plans."""
        yield RunPanel()
        with Horizontal(id="plans"):
            yield Lines(id="left", classes="panel")
            yield Lines(id="right", classes="panel")

    def on_mount(self) -> None:
        """Focus the list."""
        self.query_one(RunPanel).focus()

    async def on_screen_resume(self) -> None:
        """Reload the list, as there may be new runs."""
        await self.action_reload()

    async def action_reload(self) -> None:
        """Read the list again."""
        try:
            found = await asyncio.to_thread(runs.list_runs)
        except EvenerError as fault:
            self.evener.say(str(fault), severity="error")
            return
        self._plans.clear()
        self.query_one(RunPanel).take(found)
        self.redraw()

    def redraw(self) -> None:
        """Draw the list and the plans."""
        self.settle_frames()
        panel = self.query_one(RunPanel)
        around = 2 if self.has_class("-bare") else 4
        panel.styles.height = max(3, min(panel.count + around, (self.app.size.height - 2) * 2 // 5))
        panel.redraw()
        self._draw_plans()

    def on_list_panel_moved(self) -> None:
        """The plans follow the cursor."""
        self._draw_plans()

    def on_list_panel_opened(self) -> None:
        """Enter replays."""
        self.action_replay()

    def _draw_plans(self) -> None:
        panel = self.query_one(RunPanel)
        taken = panel.taken if panel.taken != panel.chosen else ""
        left, right = self.query_one("#left", Lines), self.query_one("#right", Lines)
        right.display = bool(taken)
        left.entitle("Compared with" if taken else "Plan")
        right.entitle("Plan")
        left.show(self._plan_lines(taken or panel.chosen, *left.size))
        if taken:
            right.show(self._plan_lines(panel.chosen, *right.size))

    def _plan_lines(self, name: str, width: int, height: int) -> tuple[Line, ...]:
        if not name:
            return ()
        found = self._found(name)
        if isinstance(found, str):
            return text_lines(found, width, 6, "bad")
        return plan_lines(found, width, height, self.evener.marks)

    def _found(self, name: str) -> Run | str:
        """The run, or why it can't be read."""
        if name not in self._plans:
            try:
                self._plans[name] = runs.load_run(name)
            except EvenerError as fault:
                self._plans[name] = str(fault)
        return self._plans[name]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer keys that need a run only if there is one."""
        if action in ("take", "export", "replay", "delete"):
            return bool(self.query(RunPanel)) and bool(self.query_one(RunPanel).count)
        return True

    def action_take(self) -> None:
        """Mark the run under the cursor for comparison with others, or remove the mark."""
        panel = self.query_one(RunPanel)
        panel.taken = "" if panel.taken == panel.chosen else panel.chosen
        panel.redraw()
        self._draw_plans()

    def action_export(self) -> None:
        """Write the plan of the run under the cursor."""
        name = self.query_one(RunPanel).chosen
        found = self._found(name) if name else ""
        if isinstance(found, str):
            self.evener.say(found, severity="error")
        elif found.plan is None:
            self.evener.say("This run has no plan.", severity="warning")
        else:
            self.app.push_screen(ExportDialog(found.plan))

    def action_replay(self) -> None:
        """Replay the run under the cursor."""
        name = self.query_one(RunPanel).chosen
        if not name:
            return
        try:
            record = read_run(name)
        except EvenerError as fault:
            self.evener.say(str(fault), severity="error")
            return
        self.app.push_screen(ReplayScreen(name, record.header, recorded_events(record)))

    def action_delete(self) -> None:
        """Delete the run under the cursor, after asking."""
        name = self.query_one(RunPanel).chosen
        if not name:
            return
        question = f"Delete the run {name} and its journal? This can't be undone."
        self.app.push_screen(ConfirmDialog("Delete a run", question, "Delete"), lambda yes: self._delete(name, yes))

    async def _delete(self, name: str, confirmed: bool | None) -> None:
        if not confirmed:
            return
        try:
            runs.delete_run(name)
        except EvenerError as fault:
            self.evener.say(str(fault), severity="error")
        await self.action_reload()
