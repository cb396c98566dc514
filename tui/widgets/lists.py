"""A panel of rows with a cursor, moved by keys, wheel and clicks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic

from textual.binding import Binding, BindingType
from textual.events import MouseScrollDown, MouseScrollUp
from textual.message import Message

from ..view.cells import Span
from ..view.marks import Marks
from ..view.table import TAG, Column, Grid, Order, Position, RowT, chosen_order, sort_keys, table_lines
from .lines import Lines


class ListPanel(Lines, Generic[RowT]):
    """Rows below a heading line; the cursor is a position among all rows, `top` the first one shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000)", "First", show=False),
        Binding("end", "move(1000000)", "Last", show=False),
        Binding("enter", "open", "Details", key_display="Enter"),
    ]
    HEADING_ROWS = 1
    OPEN = ""  # the action that shows the row under the cursor in full; empty: rows have no details

    class Moved(Message):
        """The cursor is on another row."""

    def __init__(self, title: str = "", *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id, classes="panel", focusable=True)
        self.border_title = title
        self.rows: Sequence[RowT] = ()
        self.cursor = 0
        self.top = 0

    @property
    def position(self) -> Position:
        """The cursor, drawn while the panel has the focus."""
        return Position(self.cursor, self.top, self.has_focus)

    @property
    def count(self) -> int:
        """The number of rows; with a filter, of those that match it."""
        return len(self.rows)

    @property
    def chosen(self) -> RowT | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def action_move(self, rows: int) -> None:
        """Move the cursor by `rows` rows, within the list."""
        moved = max(0, min(self.cursor + rows, self.count - 1))
        if moved != self.cursor:
            self.cursor = moved
            self.cursor_moved()
        self.redraw()
        self.post_message(self.Moved())

    def cursor_moved(self) -> None:
        """Note what is under the cursor now."""

    def action_page(self, pages: int) -> None:
        """Move by as many rows as are visible."""
        self.action_move(pages * max(1, self.size.height - self.HEADING_ROWS))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer details only where there are some."""
        return action != "open" or bool(self.OPEN)

    async def action_open(self) -> None:
        """Show the row under the cursor in full."""
        if self.count and self.OPEN:
            await self.app.run_action(self.OPEN)

    def click_row(self, row: int, clicks: int) -> None:
        """Go to the row; a double click opens it."""
        place = self.top + row - self.HEADING_ROWS
        if self.top <= place < self.count:
            self.action_move(place - self.cursor)
            if clicks >= 2:
                self.call_later(self.action_open)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move on."""
        event.stop()
        self.action_move(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move back."""
        event.stop()
        self.action_move(-1)


class SortedPanel(ListPanel[RowT]):
    """A list that is sorted and filtered, in which rows are marked; the cursor stays on its row as they move."""

    COLUMNS: ClassVar[Sequence[Column[Any]]]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s,f6", "next_sort", "Sort", show=False),
        Binding("S", "reverse", "Reverse", show=False),
        Binding("space", "tag", "Mark"),
    ]

    def __init__(self, title: str, *, id: str, order: Order) -> None:  # noqa: A002 - Textual's name
        super().__init__(title, id=id)
        self.order = order
        self.words = ""
        self.tagged: frozenset[Hashable] = frozenset()
        self._under_cursor: Hashable = None

    def identity(self, row: RowT) -> Hashable:
        """The identity of a row."""
        raise NotImplementedError

    @property
    def chosen_rows(self) -> tuple[RowT, ...]:
        """The marked rows; without any, the one under the cursor."""
        marked = tuple(row for row in self.rows if self.identity(row) in self.tagged)
        return marked or ((self.chosen,) if self.chosen is not None else ())

    def show_rows(self, grid: Grid[RowT], rows: tuple[RowT, ...], total: int, nothing: str, hidden: str = "") -> None:
        """Show these of `total` rows, with the cursor on the one that it was on; `nothing` is said if there are none.

        The heading says what the filter leaves, and what else is `hidden`.
        """
        self._place(rows)
        filtered = f"{self.count} of {total}: {self.words}" if self.words else ""
        lines, self.top = table_lines(
            grid._replace(columns=(TAG._replace(draw=self._tag_cell), *grid.columns[1:])),
            rows,
            *self.size,
            self.evener.marks,
            self.position,
            self.order,
            note=", ".join(filter(None, (filtered, hidden))),
            nothing=nothing,
        )
        self.entitle(subtitle=str(total))
        self.show(lines)

    def _tag_cell(self, row: RowT, _width: int, marks: Marks) -> tuple[Span, ...]:
        return (Span(marks.tagged if self.identity(row) in self.tagged else "", "speed"),)

    def _place(self, rows: tuple[RowT, ...]) -> None:
        self.rows = rows
        keys = [self.identity(row) for row in rows]
        if self._under_cursor in keys:
            self.cursor = keys.index(self._under_cursor)
        else:
            self.cursor = max(0, min(self.cursor, len(keys) - 1))
            self.cursor_moved()

    def cursor_moved(self) -> None:
        """Remember the row, not its place."""
        self._under_cursor = self.identity(self.chosen) if self.chosen is not None else None

    def action_tag(self) -> None:
        """Mark the row under the cursor, or remove its mark, and go on to the next."""
        if self.chosen is not None:
            self.tagged ^= {self.identity(self.chosen)}
            self.action_move(1)

    def untag(self) -> None:
        """Remove all marks."""
        self.tagged = frozenset()
        self.redraw()

    def action_next_sort(self) -> None:
        """Sort by the next column."""
        keys = sort_keys(self.COLUMNS)
        self.action_sort(keys[(keys.index(self.order.key) + 1) % len(keys)])

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.action_sort(self.order.key)

    def action_sort(self, key: str) -> None:
        """Sort by a column, as a click on its title does; the same column again reverses the order."""
        self.order = chosen_order(self.COLUMNS, key, self.order)
        self.redraw()

    def filter_by(self, words: str) -> None:
        """Keep the rows that match every word."""
        self.words = words
        self.redraw()
