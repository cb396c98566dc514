"""The first start: a card with three doors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, NamedTuple

from textual.binding import Binding, BindingType
from textual.widget import Widget

from evener.workloads.user_code import find_models

from ..view.cells import Line, Mark, Span, line, text_lines
from ..widgets.lines import Lines
from .dialogs import Dialog

DOOR_ROWS = 4  # the title, two rows of text, a blank one


class Door(NamedTuple):
    """A way on; `key` opens it."""

    key: str
    title: str
    text: str


class Doors(Lines):
    """The doors, one of them under the cursor; Enter, its key or a click opens it."""

    can_focus = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j,tab", "move(1)", "Down", show=False),
        Binding("enter", "open", "Open"),
    ]

    def __init__(self) -> None:
        super().__init__(id="doors")
        self.doors: tuple[Door, ...] = ()
        self.cursor = 0

    def offer(self, doors: tuple[Door, ...]) -> None:
        """Show these doors."""
        self.doors = doors
        self.styles.height = DOOR_ROWS * len(doors)
        self.redraw()

    def redraw(self) -> None:
        """Draw each door with its key."""
        lines: list[Line] = []
        for place, door in enumerate(self.doors):
            here = place == self.cursor
            mark = Mark.CURSOR if here else " "
            head = (Span(f"{mark} ", "strong"), Span(f"{door.key}  ", "key"))
            lines.append(line(*head, Span(door.title, "strong"), cursor=here))
            rows = list(text_lines(door.text, self.size.width, DOOR_ROWS - 2, "dim", 5))
            lines += [*rows, *[line()] * (DOOR_ROWS - 1 - len(rows))]
        self.show(lines)

    def action_move(self, steps: int) -> None:
        """Go to another door; after the last comes the first."""
        self.cursor = (self.cursor + steps) % max(1, len(self.doors))
        self.redraw()

    def action_open(self) -> None:
        """Open the door under the cursor."""
        self.screen.dismiss(self.doors[self.cursor].key)

    def click_row(self, row: int, clicks: int) -> None:
        """Open the door that was clicked."""
        place = row // DOOR_ROWS
        if place < len(self.doors):
            self.screen.dismiss(self.doors[place].key)


class WelcomeDialog(Dialog[str]):
    """Where to begin; it ends with the key of the door, or with none."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, f"dismiss('{key}')", show=False) for key in ("b", "w", "d")
    ]

    def __init__(self, trainings: int) -> None:
        super().__init__("Welcome to evener")
        self._trainings = trainings

    def content(self) -> Iterable[Widget]:
        """The question, and the doors."""
        yield Lines(id="question")
        yield Doors()

    def on_mount(self) -> None:
        """Offer the doors, and name the model of this folder once it is found."""
        text = "Where would you like to begin?  b, w, d or arrows and Enter; Esc: later."
        question = self.query_one("#question", Lines)
        question.show([*text_lines(text, self.text_width, 2, "text", 0), line()])
        question.styles.height = 2
        self._offer(())
        self.query_one(Doors).focus()
        self.run_worker(self._find_models())

    async def _find_models(self) -> None:
        self._offer(await asyncio.to_thread(find_models, Path.cwd()))

    def _offer(self, models: tuple[str, ...]) -> None:
        own = f"Found here: {models[0]}. " if models else "Your function, or a built-in network. "
        watch = "Nothing trains here yet. Start one: evener run -- python train.py"
        if self._trainings == 1:
            watch = "A training runs here now."
        elif self._trainings:
            watch = f"{self._trainings} trainings run here now."
        self.query_one(Doors).offer(
            (
                Door(
                    "b",
                    "Balance my model",
                    f"{own}A dry run takes ten seconds, a search two minutes.",
                ),
                Door("w", "Watch what trains now", watch),
                Door(
                    "d", "Show me", "A search and a training on two simulated cards, in a minute."
                ),
            )
        )
