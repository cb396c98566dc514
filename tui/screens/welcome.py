"""The dialog that welcomes the user when the app starts for the first time."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, NamedTuple

from textual.binding import Binding, BindingType
from textual.widget import Widget

from evener.devices.types import Snapshot
from evener.workloads.user_code import find_models

from ..view.cells import Line, Mark, Span, line, text_lines
from ..widgets.lines import Lines
from .dialogs import Dialog

TEXT_ROWS = 2  # maximum number of lines of an entry's description


class StartChoice(NamedTuple):
    """An entry of the welcome dialog: its key, title and description."""

    key: str
    title: str
    text: str


class StartChoices(Lines):
    """List of the welcome dialog's entries, chosen by arrow keys and Enter or by a click."""

    can_focus = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j,tab", "move(1)", "Down", show=False),
        Binding("enter", "open", "Open"),
    ]

    def __init__(self) -> None:
        super().__init__(id="start-choices")
        self.choices: tuple[StartChoice, ...] = ()
        self.cursor = 0
        self._first_rows: list[int] = []  # index of the first line of each entry

    def offer(self, choices: tuple[StartChoice, ...]) -> None:
        """Set the entries of the list."""
        self.choices = choices
        self.redraw()

    def redraw(self) -> None:
        """Draw the entries, with the cursor on one of them."""
        lines: list[Line] = []
        self._first_rows = []
        for place, choice in enumerate(self.choices):
            if lines:
                lines.append(line())
            self._first_rows.append(len(lines))
            here = place == self.cursor
            mark = Mark.CURSOR if here else " "
            head = (Span(f"{mark} ", "strong"), Span(f"{choice.key}  ", "key"))
            lines.append(line(*head, Span(choice.title, "strong"), cursor=here))
            lines += text_lines(choice.text, self.size.width, TEXT_ROWS, "dim", 5)
        self.styles.height = len(lines)
        self.show(lines)

    def action_move(self, steps: int) -> None:
        """Move the cursor by `steps`; it wraps around at the ends."""
        self.cursor = (self.cursor + steps) % max(1, len(self.choices))
        self.redraw()

    def action_open(self) -> None:
        """Choose the entry under the cursor."""
        self.screen.dismiss(self.choices[self.cursor].key)

    def click_row(self, row: int, clicks: int) -> None:
        """Choose the entry that was clicked."""
        place = bisect_right(self._first_rows, row) - 1
        if 0 <= place < len(self.choices):
            self.screen.dismiss(self.choices[place].key)


class WelcomeDialog(Dialog[str]):
    """Dialog at the first start. It returns the key of the chosen entry, or None.

    "b" balances a model, "w" watches what trains now, and "d" shows the demo.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, f"dismiss('{key}')", show=False) for key in ("b", "w", "d")
    ]

    def __init__(self) -> None:
        super().__init__("Welcome to evener")
        self._models: tuple[str, ...] = ()  # models found in the current folder

    def content(self) -> Iterable[Widget]:
        """Yield the question and the list."""
        yield Lines(id="question")
        yield StartChoices()

    def on_mount(self) -> None:
        """Show the question, and look for models in the current folder."""
        text = "Where would you like to begin?  b, w, d or arrows and Enter."
        question = self.query_one("#question", Lines)
        question.show([*text_lines(text, self.text_width, 2, "text", 0), line()])
        question.styles.height = 2
        self.watch(self.app, "snapshot", self._offer)
        self.query_one(StartChoices).focus()
        self.run_worker(self._find_models())

    async def _find_models(self) -> None:
        self._models = await asyncio.to_thread(find_models, Path.cwd())
        self._offer()

    def _offer(self) -> None:
        own = "Your function, or a built-in network. "
        if self._models:
            own = f"Found here: {self._models[0]}. "
        self.query_one(StartChoices).offer(
            (
                StartChoice(
                    "b",
                    "Balance my model",
                    f"{own}A dry run takes ten seconds, a search two minutes.",
                ),
                StartChoice("w", "Watch what trains now", format_activity(self.evener.snapshot)),
                StartChoice(
                    "d", "Show me", "A search and a training on two simulated cards, in a minute."
                ),
            )
        )


def format_activity(snapshot: Snapshot | None) -> str:
    """Describe the training runs that use the devices or, if there are none, how to start one."""
    reports = snapshot.reports if snapshot is not None else ()
    trainings = {report.training or str(report.pid) for report in reports}
    if len(trainings) == 1:
        return "A training runs here now."
    if trainings:
        return f"{len(trainings)} trainings run here now."
    processes = {process.pid for process in snapshot.processes} if snapshot is not None else ()
    if not processes:
        return "Nothing trains here yet. Start one: evener run -- python train.py"
    use = "process uses" if len(processes) == 1 else "processes use"
    return (
        f"{len(processes)} {use} the devices now. To follow the steps of your training, "
        "start it with: evener run -- python train.py"
    )
