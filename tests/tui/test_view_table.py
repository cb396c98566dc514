"""Scrolled tables: full whenever possible, with the number of hidden rows."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from evener.tui.view.cells import span_cells
from evener.tui.view.table import Column, Grid, Position, table_lines, text_cell

COLUMNS: tuple[Column[int], ...] = (
    Column("number", ("number",), (6,), text_cell(str)),
    Column(
        "word",
        ("a long title", "title"),
        (8, 9),
        text_cell(lambda row: f"row {row}"),
        "left",
        most=100,
    ),
)

GRID = Grid(COLUMNS)


@given(
    st.integers(0, 40),
    st.integers(1, 30),
    st.integers(0, 39),
    st.integers(0, 60),
    st.integers(20, 60),
)
def test_a_scrolled_table_is_full_and_counts_what_it_hides(
    count: int, height: int, cursor: int, top: int, width: int
) -> None:
    """The cursor is visible, and no row is empty while others are hidden, whatever was shown
    before.
    """
    rows = range(count)
    position = Position(min(cursor, max(0, count - 1)), top)
    (head, *shown), first = table_lines(GRID, rows, width, height, position)
    assert len(shown) == min(count, height - 1)
    assert not shown or any(line.cursor for line in shown)
    above = sum(map(int, re.findall(r"▲(\d+)", head.text)))
    below = sum(map(int, re.findall(r"▼(\d+)", head.text)))
    assert (above, below) == ((first, count - first - len(shown)))
    assert span_cells(head.spans) == width


def test_a_filter_and_hidden_rows_stand_over_the_last_titles() -> None:
    (head, *_), _ = table_lines(GRID, range(9), 40, 5, Position(8, 0), note="9 of 20: ada")
    assert head.text == " number a long title     9 of 20: ada ▲5"
