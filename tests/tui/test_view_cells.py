"""Lines and tables fill exactly their cells, whatever they contain."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.types import Reading, State
from evener.printable import plain
from evener.tui.text.formatting import folded
from evener.tui.view.cells import (
    Mark,
    Span,
    cells,
    cut,
    fit,
    join_spans,
    pad,
    span_cells,
    spread,
    to_ascii,
    whole_lines,
    wrap,
)
from evener.tui.view.charts import (
    bar,
    graph,
    nice_ceiling,
    reading_text,
    short,
    short_bytes,
    whole,
)
from evener.tui.view.table import Column, Grid, window

TEXTS = st.text(
    alphabet=st.characters(exclude_categories=["Cs", "Cc", "Mn", "Me", "Cf"]), max_size=40
)


@given(TEXTS, st.integers(0, 40))
def test_a_cut_text_never_takes_more_cells_than_there_are(text: str, width: int) -> None:
    assert cells(cut(text, width)) <= width


@given(TEXTS, st.integers(2, 40), st.sampled_from(["left", "right"]))
def test_a_fitted_text_takes_exactly_its_cells(text: str, width: int, align: str) -> None:
    assert cells(fit(text, width, align)) == width  # type: ignore[arg-type]


@given(st.lists(TEXTS, max_size=5), st.integers(0, 60))
def test_padded_spans_take_exactly_their_cells(texts: list[str], width: int) -> None:
    assert span_cells(pad(tuple(Span(text) for text in texts), width)) == width


def test_wide_signs_count_twice() -> None:
    assert cells("训练") == 4
    assert cut("训练模型", 5) == "训练…"


def test_the_right_part_goes_first_where_both_do_not_fit() -> None:
    assert spread((Span("left"),), (Span("right"),), 20).text == "left           right"
    assert spread((Span("left"),), (Span("right"),), 8).text == "left    "


@given(TEXTS, st.integers(1, 30), st.integers(1, 4))
def test_wrapped_text_keeps_to_its_box(text: str, width: int, most: int) -> None:
    rows = wrap(text, width, most)
    assert len(rows) <= most
    assert all(cells(row) <= width for row in rows)


@pytest.mark.parametrize("width", range(12, 60))
def test_no_line_ends_within_a_figure(width: int) -> None:
    """Thousands, the per cent sign and the interval stay with their number, on screens and in
    terminals.
    """
    text = (
        "Split over GPU:0 and GPU:1: 1 232 165 samples/s ± 0.7 %, 20 % faster than 827 + "
        "572 samples alone."
    )
    for rows in (wrap(text, width, 99), folded(text, width)):
        assert " ".join(rows) == text
        assert sum("1 232 165" in row for row in rows) == sum("± 0.7 %" in row for row in rows) == 1


@given(st.floats(0, 1), st.integers(0, 50))
def test_a_bar_has_the_requested_width(share: float, width: int) -> None:
    assert span_cells(bar(share, width)) == width


def test_a_bar_shows_what_is_above_nothing_and_fills_at_one() -> None:
    assert bar(0.001, 10)[0].text == "╸"
    assert bar(1.0, 4)[0].text == "━━━━"
    assert bar(0.0, 4)[0].text == ""


def test_the_filled_part_of_a_bar_differs_without_colour() -> None:
    for draw in (str, to_ascii):
        assert draw(Mark.FULL) != draw(Mark.TRACK)


def test_a_graph_of_one_row_shows_the_newest_and_leaves_gaps() -> None:
    assert graph([9, 0, None, 8], 3, 1, 8) == ("▁ █",)
    assert graph([], 3, 1, 8) == ("   ",)


@given(st.lists(st.none() | st.floats(0, 100), max_size=200), st.integers(1, 30), st.integers(1, 9))
def test_a_graph_fills_its_box(values: list[float | None], width: int, height: int) -> None:
    rows = graph(values, width, height, 100.0)
    assert len(rows) == height
    assert all(len(row) == width for row in rows)


def test_a_graph_at_its_top_is_full_and_at_nothing_keeps_a_trace() -> None:
    assert graph([100.0] * 2, 2, 1, 100.0) == ("██",)
    assert graph([0.0, 50.0, 75.0], 3, 2, 100.0) == ("  ▄", "▁█░")


@given(st.floats(1e-3, 1e12))
def test_an_axis_ends_above_its_figure_and_below_three_times_it(number: float) -> None:
    assert number <= nice_ceiling(number) * (1 + 1e-6)
    assert nice_ceiling(number) <= 2.5 * number * (1 + 1e-6)


@given(st.floats(0, 1e12))
def test_short_figures_are_short(number: float) -> None:
    assert len(short(number)) <= 5
    assert len(short_bytes(number)) <= 5


def test_short_figures_keep_what_matters() -> None:
    assert [short(number) for number in (0, 0.52, 12.3, 684.2, 2123, 12_345, 158_012, 2.1e6)] == [
        "0",
        "0.5",
        "12",
        "684",
        "2123",
        "12k",
        "158k",
        "2.1M",
    ]
    assert [short_bytes(count) for count in (0, 500, 12 * 1024, 3.4e8, 1.2 * 1024**3)] == [
        "0",
        "500B",
        "12K",
        "324M",
        "1.2G",
    ]


def test_control_signs_never_come_through() -> None:
    hostile = "a\x1b[31m\x07b\x9bc\u202ed\ne"
    shown = plain(hostile)
    assert not any(ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 or sign == "\u202e" for sign in shown)


def test_ascii_text_is_ascii_and_takes_the_same_cells() -> None:
    text = "╭─ 37 °C … – ± → 训 ▸"
    assert to_ascii(text).isascii()
    assert len(to_ascii(text)) == cells(text)


def test_letters_keep_their_shape_in_ascii() -> None:
    """A folder's name stays readable."""
    assert to_ascii("länger/modèle_训.py") == "langer/modele_??.py"


def test_an_error_in_ascii_is_no_sum() -> None:
    """2165 ± 0.5 % isn't 2165 + 0.5 %."""
    assert to_ascii("2165 ± 0.5 %") == "2165 +-0.5 %"
    assert "+ 0.5" not in to_ascii("±\u00a00.5 %")


def test_every_sign_has_an_ascii_one_in_one_cell() -> None:
    signs = "".join(each for name, each in vars(Mark).items() if name.isupper())
    assert len(to_ascii(signs)) == len(signs)
    assert "?" not in to_ascii(signs)
    assert len(set(map(to_ascii, Mark.LEVELS))) == len(Mark.LEVELS)


def test_a_thick_bar_in_ascii_ends_with_another_sign_and_is_no_arithmetic() -> None:
    block, end = to_ascii(Mark.BLOCK), to_ascii(Mark.WALL)
    assert block != end
    assert not {block, end} & set("+-=*x%")


def test_a_reading_without_a_value_yet_is_not_lost() -> None:
    """An example is the CPU % of a process at its first reading."""
    assert reading_text(Reading(State.STALE), whole, 6) == ("…", False)
    assert reading_text(Reading(State.LOST), whole, 6) == ("lost", False)


_SPANS = st.builds(
    Span,
    st.text(" ab", max_size=4),
    st.sampled_from(["text", "bad"]),
    st.sampled_from(["", "click"]),
)


@given(st.lists(_SPANS, max_size=12))
def test_spans_of_one_tone_join_and_what_can_be_clicked_stays_apart(spans: list[Span]) -> None:
    joined = [Span(*part) for part in join_spans(spans)]
    assert [sign for sign in _signs(joined) if sign[0] != " "] == [
        sign for sign in _signs(spans) if sign[0] != " "
    ]
    assert "".join(span.text for span in joined) == "".join(span.text for span in spans)
    assert [span for span in joined if span.action] == [
        span for span in spans if span.action and span.text
    ]
    assert all(span.text for span in joined)
    assert all(
        one.tone != next_one.tone or one.action or next_one.action
        for one, next_one in pairwise(joined)
    )


def _signs(spans: Iterable[Span]) -> list[tuple[str, str, str]]:
    return [(sign, span.tone, span.action) for span in spans for sign in span.text]


def test_columns_grow_in_turns_while_they_fit() -> None:
    """Each takes its second width before any takes its third; then the last one with a limit gets
    the rest.
    """
    steps = {"a": (3, 3, 9), "b": (3, 6), "c": (3,)}
    grid: Grid[int] = Grid(
        tuple(Column(key, (key,), widths, lambda *_: (), most=5) for key, widths in steps.items())
    )
    assert grid.widths(12, ()) == {"a": 3, "b": 3, "c": 3}
    assert grid.widths(15, ()) == {"a": 3, "b": 6, "c": 3}
    assert grid.widths(18, ()) == {"a": 4, "b": 6, "c": 5}
    assert grid.widths(41, ()) == {"a": 9, "b": 6, "c": 5}


@given(st.integers(1, 100), st.integers(0, 99), st.integers(1, 30), st.integers(0, 99))
def test_the_cursor_is_always_in_the_window(count: int, cursor: int, height: int, top: int) -> None:
    cursor = min(cursor, count - 1)
    first = window(count, cursor, height, top)
    assert first <= cursor < first + height
    assert first + min(height, count) <= count


@given(st.text(alphabet=st.sampled_from("ab \t\x1b\u202e漢é"), max_size=60), st.integers(2, 20))
def test_whole_lines_lose_nothing_and_fit(text: str, width: int) -> None:
    """This holds for a traceback or a variable with any content, at any width."""
    rows = [row.text for row in whole_lines(text, width)]
    assert all(cells(row) <= width for row in rows)
    assert "".join(rows) == plain(text.expandtabs(4), 1000)


def test_long_words_alone_are_broken() -> None:
    assert [row.text for row in whole_lines("    raise KeyError", 12)] == ["    raise ", "KeyError"]
    assert [row.text for row in whole_lines("    abcdefgh", 6)] == ["    ab", "cdefgh"]
