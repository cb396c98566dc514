"""Graphs of one metric each, beside and below each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cells import Line, Span, Tone, pad, span_cells
from .charts import graph
from .marks import Marks


class Graph(NamedTuple):
    """A graph: caption, newest figure, values oldest first, the top of its axis as number and text, tone."""

    caption: str
    newest: str
    values: tuple[float | None, ...]
    highest: float
    axis: str
    tone: Tone

    @property
    def is_empty(self) -> bool:
        """True for a graph without any value."""
        return all(value is None for value in self.values)


def draw_graphs(graphs: Sequence[Graph], width: int, height: int, columns: int, marks: Marks) -> tuple[Line, ...]:
    """Rows of `columns` graphs, all of one size, that fill the height."""
    rows = -(-len(graphs) // columns)
    each = (width - 2 * (columns - 1)) // columns
    lines: list[Line] = []
    for row in range(rows):
        own = height * (row + 1) // rows - height * row // rows
        drawn = [_draw(one, each, own, marks) for one in graphs[row * columns : (row + 1) * columns]]
        beside = zip(*drawn, strict=True)
        lines += [Line(tuple(span for part in parts for span in (Span("  "), *part))[1:]) for parts in beside]
    return tuple(lines)


def _draw(one: Graph, width: int, height: int, marks: Marks) -> list[tuple[Span, ...]]:
    caption = (Span(f"{one.caption} ", "title"), Span(one.newest, one.tone))
    room = width - len(one.axis) - 1
    head = pad(caption, width)
    if span_cells(caption) <= room and not one.is_empty:
        head = (*pad(caption, room), Span(f" {one.axis}", "dim"))
    rows = graph(one.values, width, height - 1, marks, one.highest)
    return [head, *((Span(row, one.tone),) for row in rows)]
