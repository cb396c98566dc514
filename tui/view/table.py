"""Tables with columns that adapt to the width, sorting, a cursor and scrolling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from evener.printable import plain

from .cells import Line, Mark, Span, Tone, cells, cut, fit, pad, span_cells, text_lines
from .teaching import Lesson, lesson_lines

RowT = TypeVar("RowT")
Cell = Callable[[RowT, int], tuple[Span, ...]]  # (row, width) -> the cell's spans
_BETWEEN = Span(" ")  # between two columns
ROWS_OF_NOTHING = 3  # lines for the message of a table without rows


class Column(NamedTuple, Generic[RowT]):
    """A column of a table, with its titles, widths, drawing function and sort key."""

    key: str
    titles: tuple[str, ...]  # the longest title first; the first that fits is shown
    widths: tuple[
        int, ...
    ]  # in cells, the narrowest first; a width listed twice lets other columns grow first
    draw: Cell[RowT]
    align: Literal["left", "right"] = "right"
    # the sort key of a row; None: not sorted by this column
    value: Callable[[RowT], float | str] | None = None
    most: int = 0  # maximum width in cells, if any are left after all columns have their last width
    needs: int = 0  # the column is hidden if the table has fewer cells
    there: Callable[[RowT], object] | None = (
        None  # the column is shown only if this is true for some row
    )


TAG: Column[Any] = Column(
    "tagged", ("",), (1,), lambda *_: (), "left"
)  # the panel draws a mark in this column of a marked row


class Grid(NamedTuple, Generic[RowT]):
    """The columns of a table, and the text to show if it has no rows.

    `draw`, if it is set, draws a row. It gets the row, the width of each column by key, the whole
    width, and whether the cursor is on the row.
    """

    columns: tuple[Column[RowT], ...]
    nothing: str | Lesson = ""  # message of a table without rows
    draw: Callable[[RowT, Mapping[str, int], int, bool], Line] | None = None

    def widths(self, width: int, rows: Sequence[RowT]) -> dict[str, int]:
        """Return the width of each visible column in cells, by the column's key."""
        # Each column starts with the first of its `widths`. While there are cells left, the columns
        # take their second widths, from left to right, then their third widths, and so on.
        # Remaining cells go to the columns that may be as wide as `most`, from right to left.
        columns = [
            column
            for column in self.columns
            if width >= column.needs and (column.there is None or any(map(column.there, rows)))
        ]
        widths = {column.key: column.widths[0] for column in columns}
        left = width - sum(widths.values()) - len(widths)
        steps = [
            (place, column.key, each)
            for column in columns
            for place, each in enumerate(column.widths)
        ]
        for _, key, wider in sorted(steps, key=lambda step: step[0]):
            if wider - widths[key] <= left:
                left -= wider - widths[key]
                widths[key] = wider
        for column in reversed(columns):
            more = max(0, min(left, column.most - widths[column.key]))
            widths[column.key] += more
            left -= more
        return widths


class Order(NamedTuple):
    """The key of the column to sort by, and the direction. The key is "" if rows aren't sorted."""

    key: str = ""
    descending: bool = True


UNSORTED = Order()


def sort_keys(columns: Sequence[Column[RowT]]) -> tuple[str, ...]:
    """Return the keys of the columns that the table can be sorted by."""
    return tuple(column.key for column in columns if column.value is not None)


def chosen_order(columns: Sequence[Column[RowT]], key: str, current: Order) -> Order:
    """Return the new sort order of a table after the user has chosen the column `key`.

    Choosing the same column again reverses the order. A new column of numbers is sorted with the
    largest first.
    """
    by_number = any(column.key == key and column.align == "right" for column in columns)
    return Order(key, not current.descending if key == current.key else by_number)


def sort_rows(
    columns: Sequence[Column[RowT]], rows: Sequence[RowT], order: Order
) -> tuple[RowT, ...]:
    """Return the rows in the given order."""
    value = next((column.value for column in columns if column.key == order.key), None)
    return (
        tuple(rows) if value is None else tuple(sorted(rows, key=value, reverse=order.descending))
    )


def matches(text: str, words: str) -> bool:
    """Return whether the text contains all words, ignoring case and order."""
    return all(word in text.lower() for word in words.lower().split())


def text_cell(text: Callable[[RowT], str], tone: Tone = "text") -> Cell[RowT]:
    """Return a function that draws a table cell: the result of `text` for the row, in one tone."""
    return lambda row, width: (Span(cut(plain(text(row)), width), tone),)


def _drawn(columns: Sequence[Column[RowT]], widths: Mapping[str, int]) -> Iterator[Column[RowT]]:
    return (column for column in columns if column.key in widths)


def _heading(
    columns: Sequence[Column[RowT]],
    widths: Mapping[str, int],
    order: Order,
    note: str,
    width: int,
) -> Line:
    """Return the line with the column titles; a mark in a title shows the sort order.

    `note` is drawn at the right end.
    """
    # A click on a title sorts by its column.
    spans: list[Span] = [Span(" ")]
    for column in _drawn(columns, widths):
        own = widths[column.key]
        sign = Mark.DESCENDING if order.descending else Mark.ASCENDING
        mark = sign if column.key == order.key else ""
        room = max(0, own - len(mark))
        title = next(
            (text for text in column.titles if len(text) <= room), cut(column.titles[-1], room, "")
        )
        action = f"sort('{column.key}')" if column.value is not None else ""
        spans += (
            Span(fit(title + mark, own, column.align, ""), "strong" if mark else "title", action),
            _BETWEEN,
        )
    titles = tuple(spans[:-1])
    whole = max(width, span_cells(titles)) if note else span_cells(titles)
    shown = cut(note, whole // 2)
    return Line((*pad(titles, whole - cells(shown)), Span(shown, "key")))


def table_row(
    columns: Sequence[Column[RowT]], widths: Mapping[str, int], row: RowT, cursor: bool = False
) -> Line:
    """Draw a row of a table. `widths` has the width of each visible column by key."""
    spans: list[Span] = [Span(Mark.CURSOR if cursor else " ", "strong")]
    for column in _drawn(columns, widths):
        width = widths[column.key]
        spans += pad(column.draw(row, width), width, column.align)
        spans.append(_BETWEEN)
    return Line(tuple(spans[:-1]), cursor)


def window(count: int, cursor: int, height: int, top: int) -> int:
    """Return the index of the first row to show in a table that scrolls.

    This is `top`, the first visible row so far, unless the cursor would be hidden or lines would be
    left empty below the last row. The table has `count` rows, and `height` of them fit.
    """
    if height <= 0 or count <= height:
        return 0
    top = min(max(top, cursor - height + 1), cursor)
    return max(0, min(top, count - height))


class Position(NamedTuple):
    """The cursor's row, the first visible row, and whether the cursor is drawn."""

    cursor: int = 0
    top: int = 0
    active: bool = True


NO_CURSOR = Position(active=False)


def table_lines(
    grid: Grid[RowT],
    rows: Sequence[RowT],
    width: int,
    height: int,
    position: Position = NO_CURSOR,
    order: Order = UNSORTED,
    note: str = "",
) -> tuple[tuple[Line, ...], int]:
    """Draw a table in `height` lines, and return the lines and the first visible row.

    The heading ends with `note` and the number of hidden rows.
    """
    widths = grid.widths(width, rows)
    room = max(0, height - 1)
    first = window(len(rows), position.cursor, room, position.top)
    shown = rows[first : first + room]
    hidden = _hidden_rows(first, len(rows) - first - len(shown))
    notes = "".join(f" {sign}" for sign in (note, *hidden) if sign)
    lines = [_heading(grid.columns, widths, order, notes, width)]
    for place, row in enumerate(shown, first):
        here = position.active and place == position.cursor
        if grid.draw:
            lines.append(grid.draw(row, widths, width, here))
        else:
            lines.append(table_row(grid.columns, widths, row, here))
    if not rows:
        lines += _nothing_lines(grid.nothing, width, max(1, room))
    return tuple(lines), first


def _hidden_rows(above: int, below: int) -> Iterator[str]:
    """Yield how many rows are hidden above and below the visible ones, each with an arrow."""
    if above:
        yield f"{Mark.ASCENDING}{above}"
    if below:
        yield f"{Mark.DESCENDING}{below}"


def _nothing_lines(nothing: str | Lesson, width: int, height: int) -> tuple[Line, ...]:
    if isinstance(nothing, Lesson):
        return lesson_lines(nothing, width, height)
    return text_lines(nothing, width, height, "dim") if nothing else ()


def whole_table(grid: Grid[RowT], rows: Sequence[RowT], width: int) -> tuple[Line, ...]:
    """Draw a table with all its rows and no cursor."""
    return table_lines(grid, rows, width, 1 + (len(rows) or ROWS_OF_NOTHING))[0]
