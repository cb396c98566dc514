"""Tables whose columns grow with the terminal; a narrow one has all of them, only narrower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from evener.printable import plain

from .cells import Line, Mark, Span, Tone, cells, cut, fit, pad, span_cells, text_lines
from .teaching import Lesson, lesson_lines

RowT = TypeVar("RowT")
Cell = Callable[[RowT, int], tuple[Span, ...]]  # of a row, in at most this many terminal cells
_BETWEEN = Span(" ")  # two columns
ROWS_OF_NOTHING = 3  # for what a whole table without rows says


class Column(NamedTuple, Generic[RowT]):
    """A column; `draw` gives its cell for a row, in at most the given width."""

    key: str
    titles: tuple[str, ...]  # the widest that fits is shown
    widths: tuple[
        int, ...
    ]  # cells, from the narrowest on; one that is there twice lets others grow first
    draw: Cell[RowT]
    align: Literal["left", "right"] = "right"
    # the sort key of a row; None: not sorted by this column
    value: Callable[[RowT], float | str] | None = None
    most: int = 0  # cells, of those that are left when all columns have their largest width
    needs: int = 0  # cells of the table, with fewer of which it isn't drawn
    there: Callable[[RowT], object] | None = None  # it is drawn if this is true for any row


TAG: Column[Any] = Column(
    "tagged", ("",), (1,), lambda *_: (), "left"
)  # the panel that marks rows draws the sign


class Grid(NamedTuple, Generic[RowT]):
    """The columns of a table.

    `draw` replaces the usual row; it gets the row, the columns' widths, that of the table, and
    whether the cursor is there.
    """

    columns: tuple[Column[RowT], ...]
    nothing: str | Lesson = ""  # is said where there are no rows
    draw: Callable[[RowT, Mapping[str, int], int, bool], Line] | None = None

    def widths(self, width: int, rows: Sequence[RowT]) -> dict[str, int]:
        """Cells for each column that is drawn in `width`, with the cursor's sign in front and one
        blank between two.

        Columns start at their least widths. Where it fits, each takes its second one, from left to
        right, then its third, and so on; then the rest goes to those with a limit, from right to
        left.
        """
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
    """The order of rows; a click on a title sorts by its column."""

    key: str = ""
    descending: bool = True


UNSORTED = Order()


def sort_keys(columns: Sequence[Column[RowT]]) -> tuple[str, ...]:
    """The columns that rows can be sorted by."""
    return tuple(column.key for column in columns if column.value is not None)


def chosen_order(columns: Sequence[Column[RowT]], key: str, before: Order) -> Order:
    """The order by a column that was chosen: figures begin with the largest, and the same column
    again reverses it.
    """
    figures = any(column.key == key and column.align == "right" for column in columns)
    return Order(key, not before.descending if key == before.key else figures)


def sort_rows(
    columns: Sequence[Column[RowT]], rows: Sequence[RowT], order: Order
) -> tuple[RowT, ...]:
    """The rows sorted by the order's column; equal ones stay in theirs."""
    value = next((column.value for column in columns if column.key == order.key), None)
    return (
        tuple(rows) if value is None else tuple(sorted(rows, key=value, reverse=order.descending))
    )


def matches(text: str, words: str) -> bool:
    """True if every word is in the text; case is ignored."""
    return all(word in text.lower() for word in words.lower().split())


def text_cell(text: Callable[[RowT], str], tone: Tone = "text") -> Cell[RowT]:
    """A column's `draw` for plain text, cut to the width."""
    return lambda row, width: (Span(cut(plain(text(row)), width), tone),)


def _drawn(columns: Sequence[Column[RowT]], widths: Mapping[str, int]) -> Iterator[Column[RowT]]:
    return (column for column in columns if column.key in widths)


def _heading(
    columns: Sequence[Column[RowT]],
    widths: Mapping[str, int],
    order: Order,
    more: str,
    width: int,
) -> Line:
    """The titles; `more` is at the right end of `width` cells, over the last ones."""
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
    whole = max(width, span_cells(titles)) if more else span_cells(titles)
    shown = cut(more, whole // 2)
    return Line((*pad(titles, whole - cells(shown)), Span(shown, "key")))


def table_row(
    columns: Sequence[Column[RowT]], widths: Mapping[str, int], row: RowT, cursor: bool = False
) -> Line:
    """A row of a table; a sign in front marks the cursor, so that it is visible without colour."""
    spans: list[Span] = [Span(Mark.CURSOR if cursor else " ", "strong")]
    for column in _drawn(columns, widths):
        width = widths[column.key]
        spans += pad(column.draw(row, width), width, column.align)
        spans.append(_BETWEEN)
    return Line(tuple(spans[:-1]), cursor)


def window(count: int, cursor: int, height: int, top: int) -> int:
    """The first of `count` rows to show so that the cursor is visible in `height` rows; moves as
    little as needed.
    """
    if height <= 0 or count <= height:
        return 0
    top = min(max(top, cursor - height + 1), cursor)
    return max(0, min(top, count - height))


class Position(NamedTuple):
    """The position of a list: the row under the cursor, the first row shown, and whether the cursor
    is drawn.
    """

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
    """The heading and the rows that fit below it in `height`, scrolled to the cursor, and the first
    row shown.

    The heading ends with `note` and the number of rows above and below those shown.
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
    """How many rows there are above and below those shown."""
    if above:
        yield f"{Mark.ASCENDING}{above}"
    if below:
        yield f"{Mark.DESCENDING}{below}"


def _nothing_lines(nothing: str | Lesson, width: int, height: int) -> tuple[Line, ...]:
    if isinstance(nothing, Lesson):
        return lesson_lines(nothing, width, height)
    return text_lines(nothing, width, height, "dim") if nothing else ()


def whole_table(grid: Grid[RowT], rows: Sequence[RowT], width: int) -> tuple[Line, ...]:
    """The heading and every row; without rows, what the grid says instead, whole."""
    return table_lines(grid, rows, width, 1 + (len(rows) or ROWS_OF_NOTHING))[0]
