"""A panel of rows with a cursor, moved by keys, wheel and clicks."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from evener.tui.view.table import Position
from evener.tui.widgets.lines import Lines


class ListPanel(Lines):
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

    class Moved(Message):
        """The cursor is on another row."""

    class Opened(Message):
        """The user wants to see the row under the cursor in full."""

        def __init__(self, panel: ListPanel) -> None:
            super().__init__()
            self.panel = panel

    def __init__(self, title: str = "", *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id, classes="panel", focusable=True)
        self.border_title = title
        self.cursor = 0
        self.top = 0

    @property
    def position(self) -> Position:
        """The cursor, drawn while the panel has the focus."""
        return Position(self.cursor, self.top, self.has_focus)

    @property
    def count(self) -> int:
        """How many rows there are."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Rebuild the lines."""
        raise NotImplementedError

    def action_move(self, rows: int) -> None:
        """Move the cursor by so many rows, within the list."""
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

    def action_open(self) -> None:
        """Show the row under the cursor in full."""
        if self.count:
            self.post_message(self.Opened(self))

    def on_lines_row_clicked(self, event: Lines.RowClicked) -> None:
        """Go to the row; a double click opens it."""
        event.stop()
        row = self.top + event.row - self.HEADING_ROWS
        if event.row < self.HEADING_ROWS or row >= self.count:
            return
        self.action_move(row - self.cursor)
        if event.clicks >= 2:
            self.action_open()

    def on_lines_scrolled(self, event: Lines.Scrolled) -> None:
        """Move with the wheel."""
        event.stop()
        self.action_move(event.rows)

    def watch_has_focus(self, has_focus: bool) -> None:
        """Show or hide the cursor."""
        super().watch_has_focus(has_focus)
        self.redraw()
