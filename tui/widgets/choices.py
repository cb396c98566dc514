"""Choices in a form: a list with ticks, and one of a few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from ..view.cells import Line, Span, clean, cut, line, pad, span_cells
from ..view.table import window
from .lines import Lines
from .lists import ListPanel


class Ticks(ListPanel[tuple[str, str]]):
    """A list in which several entries, or exactly one, are ticked."""

    HEADING_ROWS = 0
    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "tick", "Tick"), Binding("enter", "tick", show=False)]

    def __init__(self, *, id: str, title: str, single: bool = False) -> None:  # noqa: A002 - Textual's name
        super().__init__(title, id=id)
        self._single = single
        self.ticked: frozenset[int] = frozenset()

    def offer(self, entries: Sequence[tuple[str, str]], ticked: frozenset[int]) -> None:
        """Set the name and note of each entry, and which ones are ticked."""
        self.rows, self.ticked = entries, ticked
        self.cursor = min(ticked, default=0) if self._single else 0
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the rows; the first and the last one say how many more are hidden."""
        width, height = self.size
        self.top = window(self.count, self.cursor, height, self.top)
        shown = range(self.top, min(self.count, self.top + height))
        marks = self.evener.marks
        above, below = self.top, self.count - shown.stop
        hidden = {shown.start: f" {marks.ascending}{above}" if above else ""}
        if below:
            hidden[shown.stop - 1] = f" {marks.descending}{below}"
        self.show([self._row(place, width, hidden.get(place, "")) for place in shown])

    def _row(self, place: int, width: int, more: str) -> Line:
        marks, (name, note) = self.evener.marks, self.rows[place]
        here = self.has_focus and place == self.cursor
        inside = ("o" if self._single else "x") if place in self.ticked else " "
        longest = max(len(name) for name, _ in self.rows)
        box = f"({inside})" if self._single else f"[{inside}]"
        spans = (
            Span(marks.cursor if here else " ", "strong"),
            Span(f"{box} ", "speed" if place in self.ticked else "dim"),
            Span(f"{clean(name):<{min(longest, 28)}}  ", "text"),
        )
        room = max(0, width - span_cells(spans) - len(more))
        rest = cut(clean(note), room, marks.ellipsis)
        return Line((*spans, *pad((Span(rest, "dim"),), room), Span(more, "key")), here)

    def action_tick(self) -> None:
        """Tick the entry under the cursor, or untick it where several may be ticked."""
        if not self.count:
            return
        here = frozenset({self.cursor})
        self.ticked = here if self._single else self.ticked ^ here
        self.redraw()

    def tick_only(self, place: int) -> None:
        """Tick this entry and no other."""
        if 0 <= place < self.count and self.ticked != frozenset({place}):
            self.ticked = frozenset({place})
            self.cursor = place
            self.redraw()

    def click_row(self, row: int, clicks: int) -> None:
        """A click ticks."""
        if self.top + row < self.count:
            self.action_move(self.top + row - self.cursor)
            self.action_tick()


class OneOf(Lines):
    """A choice among a few words; left, right, Space or a click changes it."""

    class Changed(Message):
        """Another word is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,space,enter", "change(1)", "Next", show=False),
        Binding("left", "change(-1)", "Previous", show=False),
    ]

    def __init__(self, words: Sequence[str], *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id, classes="bar", focusable=True)
        self._words = tuple(words)
        self.value = self._words[0]

    def redraw(self) -> None:
        """Show the word between arrows."""
        self.show([line(Span("< ", "key"), Span(self.value, "strong"), Span(" >", "key"), cursor=self.has_focus)])

    def action_change(self, steps: int) -> None:
        """Move the choice by `steps` words."""
        place = self._words.index(self.value)
        self.value = self._words[(place + steps) % len(self._words)]
        self.redraw()
        self.post_message(self.Changed())

    def click_row(self, row: int, clicks: int) -> None:
        """A click goes to the next word."""
        self.action_change(1)
