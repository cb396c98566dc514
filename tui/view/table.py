"""Tables whose columns grow with the terminal; a narrow one has all of them, only narrower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from evener.tui.view.cells import Line, Span, Tone, clean, cut, fit, pad
from evener.tui.view.marks import Marks

RowT = TypeVar("RowT")


class Column(NamedTuple, Generic[RowT]):
    """One column; `draw` gives its cell for a row, in at most the given width."""

    key: str
    titles: tuple[str, ...]  # the widest that fits is shown
    least: int  # cells at the narrowest
    draw: Callable[[RowT, int, Marks], tuple[Span, ...]]
    align: Literal["left", "right"] = "right"


def text_cell(text: Callable[[RowT], str], tone: Tone = "text") -> Callable[[RowT, int, Marks], tuple[Span, ...]]:
    """A column's `draw` for plain text, cut to the width."""
    return lambda row, width, marks: (Span(cut(clean(text(row)), width, marks.ellipsis), tone),)


def column_widths(
    columns: Sequence[Column[RowT]],
    growth: Sequence[tuple[str, int]],
    flexible: Mapping[str, int],
    total: int,
) -> dict[str, int]:
    """Cells for each column in `total`, one blank between two.

    Columns start at their least widths. Each step of `growth` (a column, its next width) is taken in order where it
    fits; then the flexible columns share the rest, up to their limits.
    """
    widths = {column.key: column.least for column in columns}
    left = total - sum(widths.values()) - (len(widths) - 1)
    for key, width in growth:
        more = width - widths[key]
        if 0 < more <= left:
            widths[key] = width
            left -= more
    for key, limit in flexible.items():
        more = max(0, min(left, limit - widths[key]))
        widths[key] += more
        left -= more
    return widths


def heading(
    columns: Sequence[Column[RowT]],
    widths: Mapping[str, int],
    marks: Marks,
    *,
    sorted_by: str = "",
    descending: bool = True,
    action: str = "",
) -> Line:
    """The titles; with `action`, such as "sort('{}')", each can be clicked."""
    spans: list[Span] = []
    for column in columns:
        width = widths[column.key]
        mark = ""
        if column.key == sorted_by:
            mark = marks.descending if descending else marks.ascending
        room = width - len(mark)
        title = next((text for text in column.titles if len(text) <= room), cut(column.titles[-1], room, ""))
        shown = fit(title + mark, width, column.align, "")
        spans.append(Span(shown, "strong" if mark else "title", action.format(column.key) if action else ""))
        spans.append(Span(" ", "title"))
    return Line((Span(" "), *spans[:-1]))


def table_row(
    columns: Sequence[Column[RowT]], widths: Mapping[str, int], row: RowT, marks: Marks, *, cursor: bool = False
) -> Line:
    """One row; a sign in front marks the cursor, so that it is visible without colour."""
    spans: list[Span] = [Span(marks.cursor if cursor else " ", "strong")]
    for column in columns:
        width = widths[column.key]
        spans += pad(column.draw(row, width, marks), width, column.align)
        spans.append(Span(" "))
    return Line(tuple(spans[:-1]), cursor)


def window(count: int, cursor: int, height: int, top: int) -> int:
    """The first of `count` rows to show so that the cursor is visible in `height` rows; moves as little as needed."""
    if height <= 0 or count <= height:
        return 0
    top = min(max(top, cursor - height + 1), cursor)
    return max(0, min(top, count - height))


class Position(NamedTuple):
    """Where a list is: the row under the cursor, the first row shown, and whether the cursor is drawn."""

    cursor: int = 0
    top: int = 0
    active: bool = True


NO_CURSOR = Position(active=False)


def scrolled(
    head: Line, rows: Sequence[RowT], draw: Callable[[RowT, bool], Line], height: int, position: Position
) -> tuple[tuple[Line, ...], int]:
    """The heading and the rows that fit below it in `height`, scrolled to the cursor, and the first row shown.

    `draw` gets a row, and whether the cursor is on it.
    """
    room = max(0, height - 1)
    first = window(len(rows), position.cursor, room, position.top)
    shown = enumerate(rows[first : first + room], first)
    return (head, *(draw(row, position.active and place == position.cursor) for place, row in shown)), first
