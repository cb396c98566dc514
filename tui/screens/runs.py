"""The Runs screen: past runs, the plan of one beside that of another, export, replay, deletion."""

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
from evener.tui.runtime.run_replay import events_of, read_run
from evener.tui.screens.base import PanelScreen
from evener.tui.screens.dialogs import ConfirmDialog
from evener.tui.screens.export import ExportDialog
from evener.tui.screens.replay import ReplayScreen
from evener.tui.view.cells import Line, Span, clean, line, wrap
from evener.tui.view.runs import plan_lines, run_lines
from evener.tui.widgets.lines import Lines
from evener.tui.widgets.lists import ListPanel


class RunPanel(ListPanel):
    """One row a run, the newest first."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "Replay", show=False)]

    def __init__(self) -> None:
        super().__init__(id="runs")
        self.border_title = "Runs"
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
        """Work the rows out again."""
        width, height = self.size
        lines, self.top = run_lines(self.runs, self.taken, width, height, self.evener.marks, self.cursor, self.top)
        self.entitle(subtitle=str(self.count))
        self.show(lines)


class RunsScreen(PanelScreen):
    """Reads the journals when it is opened and when it is asked to."""

    NAME = "runs"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "take", "Compare"),
        Binding("e", "export", "Export"),
        Binding("r", "replay", "Replay"),
        Binding("d,delete", "delete", "Delete"),
        Binding("f5", "reload", "Look again", show=False),
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
        """Begin at the list."""
        self.query_one(RunPanel).focus()

    async def on_screen_resume(self) -> None:
        """Runs may have come since the last look."""
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
            return tuple(line(Span(f" {row}", "bad")) for row in wrap(clean(found), max(4, width - 2), 6))
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
        """Keys that need a run are not offered without one."""
        if action in ("take", "export", "replay", "delete"):
            return bool(self.query(RunPanel)) and bool(self.query_one(RunPanel).count)
        return True

    def action_take(self) -> None:
        """Take the run under the cursor to compare it with others, or let it go."""
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
        """Show again how the run under the cursor went."""
        name = self.query_one(RunPanel).chosen
        if not name:
            return
        try:
            record = read_run(name)
        except EvenerError as fault:
            self.evener.say(str(fault), severity="error")
            return
        self.app.push_screen(ReplayScreen(name, record.header, events_of(record)))

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
