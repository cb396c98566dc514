"""Tables whose columns grow with the terminal: at the narrowest every column is there, only narrower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from evener.tui.view.cells import Line, Span, cut, fit, pad
from evener.tui.view.marks import Marks

RowT = TypeVar("RowT")


class Column(NamedTuple, Generic[RowT]):
    """One column; `draw` gives its cell for a row in a width, and may use less than all of it."""

    key: str
    titles: tuple[str, ...]  # the widest that fits is shown
    least: int  # cells at the narrowest
    draw: Callable[[RowT, int, Marks], tuple[Span, ...]]
    align: Literal["left", "right"] = "right"


def column_widths(
    columns: Sequence[Column[RowT]],
    growth: Sequence[tuple[str, int]],
    flexible: Mapping[str, int],
    total: int,
) -> dict[str, int]:
    """Cells for each column in `total`, one blank between two.

    From the least widths, each step of `growth` (a column, its next width) is taken where it still fits, in order;
    then the flexible columns share what is left, up to their own limits.
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
    """The titles; with `action` ("sort('{}')" or the like) each can be clicked."""
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
    """One row; the cursor shows as a sign in front, so that it is seen without colour too."""
    spans: list[Span] = [Span(marks.cursor if cursor else " ", "strong")]
    for column in columns:
        width = widths[column.key]
        spans += pad(column.draw(row, width, marks), width, column.align)
        spans.append(Span(" "))
    return Line(tuple(spans[:-1]), cursor)


def window(count: int, cursor: int, height: int, top: int) -> int:
    """The first row to show of `count` so that the cursor is among `height` rows, moving as little as needed."""
    if height <= 0 or count <= height:
        return 0
    top = min(max(top, cursor - height + 1), cursor)
    return max(0, min(top, count - height))
