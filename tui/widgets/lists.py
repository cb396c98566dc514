"""Tables with a cursor, lists of check boxes, and fields with a choice of words."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic

from textual.binding import Binding, BindingType
from textual.events import MouseScrollDown, MouseScrollUp
from textual.message import Message

from evener.printable import plain

from ..view.cells import Line, Mark, Span, cut, line, pad, span_cells
from ..view.table import (
    TAG,
    UNSORTED,
    Column,
    Grid,
    Order,
    Position,
    RowT,
    chosen_order,
    matches,
    sort_keys,
    sort_rows,
    table_lines,
    window,
)
from .lines import Lines


class ListPanel(Lines, Generic[RowT]):
    """Base class of tables with a cursor that keys, clicks and the mouse wheel move.

    Subclasses implement `grid` and, if the order of rows can change, `identity`.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "move(-1000000)", "First", show=False),
        Binding("end", "move(1000000)", "Last", show=False),
        Binding("enter", "open", "Details", key_display="Enter"),
    ]
    can_focus = True
    HEADING_ROWS = 1
    OPEN = ""  # the action that shows the row under the cursor in full; empty: rows have no details

    class Moved(Message):
        """Posted after the user has moved the cursor."""

    def __init__(self, title: str = "", *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(title, id=id, classes="panel")
        self.rows: Sequence[RowT] = ()
        self.cursor = 0
        self.top = 0
        self._under_cursor: Hashable = None

    @property
    def position(self) -> Position:
        """The cursor and the first visible row."""
        return Position(self.cursor, self.top, self.has_focus)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @property
    def chosen(self) -> RowT | None:
        """The row under the cursor, or None if there are no rows."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def action_move(self, rows: int) -> None:
        """Move the cursor by `rows`. It stops at the first and last row."""
        moved = max(0, min(self.cursor + rows, self.count - 1))
        if moved != self.cursor:
            self.cursor = moved
            self._note_cursor()
        self.redraw()
        self.post_message(self.Moved())

    def grid(self) -> Grid[RowT]:
        """Return the column definitions of the table; subclasses implement it."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw the table."""
        self._draw_table(self.grid())

    def _draw_table(self, grid: Grid[RowT], order: Order = UNSORTED, note: str = "") -> None:
        lines, self.top = table_lines(grid, self.rows, *self.size, self.position, order, note)
        self.show(lines)

    def identity(self, row: RowT) -> Hashable:
        """Return a key that identifies a row, so that the cursor follows it to another position.

        If it is None, the cursor stays at its position.
        """
        return None

    def place_rows(self, rows: Sequence[RowT]) -> None:
        """Set the rows, and keep the cursor on the same row if it still exists."""
        was_empty, self.rows = not self.rows, rows
        if was_empty != (not rows):
            self.refresh_bindings()
        keys = [self.identity(row) for row in rows]
        if self._under_cursor is not None and self._under_cursor in keys:
            self.cursor = keys.index(self._under_cursor)
        else:
            self.cursor = max(0, min(self.cursor, len(keys) - 1))
            self._note_cursor()

    def _note_cursor(self) -> None:
        """Remember which row is under the cursor, to find it again when rows are reordered."""
        self._under_cursor = self.identity(self.chosen) if self.chosen is not None else None

    def action_page(self, pages: int) -> None:
        """Move the cursor by pages."""
        self.action_move(pages * max(1, self.size.height - self.HEADING_ROWS))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible. An empty table has no row to mark or open."""
        if action == "tag":
            return bool(self.count)
        return action != "open" or bool(self.OPEN and self.count)

    async def action_open(self) -> None:
        """Open details of the row under the cursor."""
        if self.count and self.OPEN:
            await self.app.run_action(self.OPEN)

    def click_row(self, row: int, clicks: int) -> None:
        """Move the cursor to the row. A double click opens its details."""
        place = self.top + row - self.HEADING_ROWS
        if self.top <= place < self.count:
            self.action_move(place - self.cursor)
            if clicks >= 2:
                self.call_later(self.action_open)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move the cursor down."""
        event.stop()
        self.action_move(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move the cursor up."""
        event.stop()
        self.action_move(-1)


class SortedPanel(ListPanel[RowT]):
    """Base class of tables that the user can sort, filter and mark rows in.

    Subclasses define `COLUMNS`, `identity` and `search_text_of`.
    """

    COLUMNS: ClassVar[Sequence[Column[Any]]]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s,f6", "next_sort", "Sort", show=False),
        Binding("S", "reverse", "Reverse the order", show=False),
        Binding("space", "tag", "Mark", key_display="Space"),
    ]

    def __init__(self, title: str, *, id: str, order: Order) -> None:  # noqa: A002 - Textual's name
        super().__init__(title, id=id)
        self.order = order
        self.words = ""
        self.found: Sequence[RowT] = ()  # including rows that the filter hides
        self.tagged: frozenset[Hashable] = frozenset()

    @property
    def chosen_rows(self) -> tuple[RowT, ...]:
        """The marked rows, or the row under the cursor if none is marked."""
        marked = tuple(row for row in self.rows if self.identity(row) in self.tagged)
        return marked or ((self.chosen,) if self.chosen is not None else ())

    def search_text_of(self, row: RowT) -> str:
        """Return the text that the filter searches; subclasses implement it."""
        raise NotImplementedError

    def set_data(self, rows: Sequence[RowT]) -> None:
        """Set all rows, before filtering and sorting."""
        self.found = rows
        self.redraw()

    def redraw(self) -> None:
        """Filter, sort and draw the rows."""
        kept = [row for row in self.found if matches(self.search_text_of(row), self.words)]
        self.place_rows(sort_rows(self.COLUMNS, kept, self.order))
        total = len(self.found)
        self.entitle(subtitle=f"{total} in all" if total > 1 else "")
        grid = self.grid()
        grid = grid._replace(columns=(TAG._replace(draw=self._tag_cell), *grid.columns[1:]))
        self._draw_table(
            grid, self.order, f"{self.count} of {total}: {self.words}" if self.words else ""
        )

    def _tag_cell(self, row: RowT, _width: int) -> tuple[Span, ...]:
        return (Span(Mark.TAGGED if self.identity(row) in self.tagged else "", "speed"),)

    def action_tag(self) -> None:
        """Mark or unmark the row under the cursor, then move the cursor down."""
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
        """Reverse the sort order."""
        self.action_sort(self.order.key)

    def action_sort(self, key: str) -> None:
        """Sort by the column with this key. If it is the current one already, reverse the order."""
        self.order = chosen_order(self.COLUMNS, key, self.order)
        self.redraw()

    def filter_by(self, words: str) -> None:
        """Show only rows whose text contains all of these words."""
        self.words = words
        self.redraw()


class Ticks(ListPanel[tuple[str, str]]):
    """List of entries with check boxes. With `single`, exactly one entry is always ticked."""

    HEADING_ROWS = 0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "tick", "Tick", key_display="Space"),
        Binding("enter", "tick", show=False),
    ]

    class Ticked(Message):
        """Posted after the user has ticked or cleared an entry."""

    # Textual's name
    def __init__(self, *, id: str, title: str, single: bool = False) -> None:  # noqa: A002
        super().__init__(title, id=id)
        self._single = single
        self.ticked: frozenset[int] = frozenset()

    def offer(self, entries: Sequence[tuple[str, str]], ticked: frozenset[int]) -> None:
        """Set the entries, each a name and a note, and the positions of those that are ticked."""
        self.rows, self.ticked = entries, ticked
        self.cursor = min(ticked, default=0) if self._single else 0
        self.redraw()

    def redraw(self) -> None:
        """Draw as many entries as fit, and say how many are hidden."""
        width, height = self.size
        self.top = window(self.count, self.cursor, height, self.top)
        shown = range(self.top, min(self.count, self.top + height))
        above, below = self.top, self.count - shown.stop
        hidden = {shown.start: f" {Mark.ASCENDING}{above}" if above else ""}
        if below:
            hidden[shown.stop - 1] = f" {Mark.DESCENDING}{below}"
        self.show([self._row(place, width, hidden.get(place, "")) for place in shown])

    def _row(self, place: int, width: int, more: str) -> Line:
        name, note = self.rows[place]
        here = self.has_focus and place == self.cursor
        ticked = place in self.ticked
        longest = max(len(name) for name, _ in self.rows)
        boxes = ("( )", "(o)") if self._single else ("[ ]", "[x]")
        spans = (
            Span(Mark.CURSOR if here else " ", "strong"),
            Span(f"{boxes[ticked]} ", "speed" if ticked else "dim"),
            Span(f"{plain(name):<{min(longest, 28)}}  ", "text"),
        )
        room = max(0, width - span_cells(spans) - len(more))
        rest = cut(plain(note), room)
        return Line((*spans, *pad((Span(rest, "dim"),), room), Span(more, "key")), here)

    def action_move(self, rows: int) -> None:
        """Move the cursor by `rows`. In a list with `single`, the tick moves with it."""
        super().action_move(rows)
        if self._single and self.count and self.ticked != frozenset({self.cursor}):
            self.action_tick()

    def action_tick(self) -> None:
        """Tick or clear the entry under the cursor."""
        if not self.count:
            return
        here = frozenset({self.cursor})
        self.ticked = here if self._single else self.ticked ^ here
        self.redraw()
        self.post_message(self.Ticked())

    def tick_only(self, index: int) -> None:
        """Tick one entry and clear all others, without posting a message."""
        if 0 <= index < self.count and self.ticked != frozenset({index}):
            self.ticked = frozenset({index})
            self.cursor = index
            self.redraw()

    def click_row(self, row: int, clicks: int) -> None:
        """Move the cursor to the entry, and tick or clear it."""
        if self.top + row < self.count:
            self.action_move(self.top + row - self.cursor)
            self.action_tick()


class OneOf(Lines):
    """Field that shows one of several words. An arrow key or a click switches to another word."""

    can_focus = True

    class Changed(Message):
        """Posted after the user has chosen another word."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,space,enter", "change(1)", "Next", show=False),
        Binding("left", "change(-1)", "Previous", show=False),
    ]

    # Textual's name
    def __init__(self, words: Sequence[str], *, id: str, value: str = "") -> None:  # noqa: A002
        super().__init__(id=id, classes="bar")
        self._words = tuple(words)
        self.value = value or self._words[0]

    def redraw(self) -> None:
        """Draw the chosen word between two arrows."""
        self.show(
            [
                line(
                    Span("< ", "key"),
                    Span(self.value, "strong"),
                    Span(" >", "key"),
                    cursor=self.has_focus,
                )
            ]
        )

    def action_change(self, steps: int) -> None:
        """Move on by `steps` words. The first word follows the last one."""
        place = self._words.index(self.value)
        self.value = self._words[(place + steps) % len(self._words)]
        self.redraw()
        self.post_message(self.Changed())

    def click_row(self, row: int, clicks: int) -> None:
        """Choose the next word."""
        self.action_change(1)
