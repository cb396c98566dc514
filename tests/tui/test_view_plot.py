"""Charts fill their cells exactly, ticks are round, and every point agrees with its axes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.tui.view.cells import span_cells, to_ascii
from evener.tui.view.plot import (
    Chart,
    PlotPoint,
    Series,
    Zone,
    draw_chart,
    frame_chart,
    make_axis,
    nearest,
    read_out_line,
)

FIGURES = st.floats(1e-3, 1e9)
POINTS = st.lists(st.tuples(FIGURES, FIGURES), min_size=1, max_size=8)


def _chart(points: list[tuple[float, float]], **changed: Any) -> Chart:
    series = Series("GPU:0", "device0", tuple(PlotPoint(*each) for each in points), tuple(points))
    return Chart((series,), x_caption="rows", y_caption="samples/s")._replace(**changed)


@given(POINTS, st.integers(24, 150), st.integers(5, 40), st.booleans(), st.booleans())
def test_a_chart_fills_exactly_its_cells(
    points: list[tuple[float, float]], width: int, height: int, log2_x: bool, log2_y: bool
) -> None:
    chart = _chart(
        points,
        log2_x=log2_x,
        log2_y=log2_y,
        cursor=points[0][0],
        zones=(Zone(points[-1][0], label="memory ends"),),
    )
    lines = draw_chart(chart, width, height)
    assert len(lines) == height
    assert {span_cells(line.spans) for line in lines} == {width}
    assert all(to_ascii(line.text).isascii() for line in lines)


@given(st.lists(FIGURES, min_size=1, max_size=8), st.booleans())
def test_every_figure_has_a_place_on_its_axis_and_ticks_are_round(
    figures: list[float], log2: bool
) -> None:
    axis = make_axis(figures, log2=log2)
    assert axis.low <= min(figures)
    assert max(figures) <= axis.high * (1 + 1e-9)
    ticks = axis.ticks(6)
    assert 1 <= len(ticks) <= 8
    for tick in ticks:
        assert axis.low <= tick <= axis.high * (1 + 1e-9)
        if log2:
            assert math.log2(tick) == round(math.log2(tick))
    if not log2 and len(ticks) > 1:
        step = ticks[1] - ticks[0]
        assert [after - before for before, after in pairwise(ticks)] == pytest.approx(
            [step] * (len(ticks) - 1)
        )
        digits = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert round(digits * 4, 6) == round(digits * 4), "quarters of a power of ten"


def test_on_a_log_axis_equal_factors_are_equally_far_apart() -> None:
    """Small batches aren't crowded at the left, as they are on a linear axis."""
    points = [(8.0, 100.0), (64.0, 400.0), (512.0, 900.0), (4096.0, 1000.0)]
    frame = frame_chart(_chart(points), 100, 20)
    columns = [frame.column(x) for x, _ in points]
    steps = [after - before for before, after in pairwise(columns)]
    assert max(steps) - min(steps) <= 1
    linear = frame_chart(_chart(points, log2_x=False), 100, 20)
    assert linear.column(64.0) - linear.column(8.0) <= 2


def test_an_interval_is_a_stroke_as_tall_as_it_is_wide() -> None:
    series = Series("A", "device0", (PlotPoint(1, 100, 50, 200), PlotPoint(8, 100, 99, 101)))
    lines = draw_chart(Chart((series,), log2_x=False, log2_y=False), 60, 23)
    frame = frame_chart(Chart((series,), log2_x=False, log2_y=False), 60, 23)

    def rows(x: float) -> int:
        column = frame.left + frame.column(x)
        return sum("\u2800" < line.text[column] <= "\u28ff" for line in lines[1:-2])

    assert rows(1) > 8
    assert rows(8) <= 2


def test_a_prediction_is_dashed_and_what_is_known_is_not() -> None:
    line = tuple((float(x), 100.0) for x in range(1, 65))
    chart = Chart((Series("A", "device0", (), line, known_to=32.0),), log2_x=False, log2_y=False)
    drawn = draw_chart(chart, 90, 15)
    frame = frame_chart(chart, 90, 15)
    row = next(line for line in drawn if "⠒⠒⠒" in line.text or "⠉⠉⠉" in line.text)
    middle = frame.left + frame.column(32.0)
    assert " " not in row.text[frame.left + 3 : middle - 1]
    assert " " in row.text[middle + 2 : frame.left + frame.column(64.0)]


def test_memory_s_end_is_hatched_from_its_batch_on() -> None:
    chart = _chart([(8, 100), (64, 300)], zones=(Zone(256, label="memory ends"), Zone(1024, 1024)))
    frame = frame_chart(chart, 100, 12)
    text = "\n".join(line.text for line in draw_chart(chart, 100, 12))
    assert "memory ends" in text
    row = text.splitlines()[6]
    limit_column = frame.left + frame.column(256)
    assert row[limit_column + 1] == "╱"
    assert "╱" not in row[:limit_column]


def test_the_cursor_reads_out_every_series_at_its_point() -> None:
    one = Series("GPU:0", "device0", (PlotPoint(8, 120, text="120 samples/s ± 1 %, probe 3"),))
    other = Series("GPU:1", "device1", (PlotPoint(8, 60), PlotPoint(64, 90)))
    chart = Chart((one, other), x_caption="rows", cursor=8)
    text = read_out_line(chart, 100).text
    assert "8 rows" in text
    assert "GPU:0 120 samples/s ± 1 %, probe 3" in text
    assert "GPU:1 60" in text
    assert "read the points" in read_out_line(chart._replace(cursor=None), 60).text
    assert chart.stops() == (8, 64)


def test_a_click_finds_the_nearest_point() -> None:
    chart = _chart([(8, 100), (64, 300), (512, 400)])
    frame = frame_chart(chart, 80, 15)
    for stop in chart.stops():
        assert nearest(chart.stops(), frame, frame.column(stop)) == stop
    assert nearest(chart.stops(), frame, -5) == 8
    assert nearest((), frame, 3) is None


@pytest.mark.parametrize(("width", "height"), [(10, 10), (60, 3), (0, 0)])
def test_without_room_nothing_is_drawn(width: int, height: int) -> None:
    assert draw_chart(_chart([(8, 100)]), width, height) == ()


def test_an_empty_chart_says_why() -> None:
    lines = draw_chart(Chart(nothing="No split was measured yet."), 60, 10)
    assert [line.text for line in lines] == [" No split was measured yet."]


@given(st.integers(5, 60), st.floats(1.0, 1e5), st.booleans())
def test_marks_of_y_are_at_about_equal_distances(height: int, highest: float, log2: bool) -> None:
    """One row more or less is a large part of a small distance."""
    points = tuple(PlotPoint(x, y) for x, y in ((1.0, highest / 50), (9.0, highest)))
    frame = frame_chart(Chart((Series("one", "accent", points),), log2_y=log2), 60, height)
    rows = [frame.row(tick) for tick in frame.y_ticks()]
    gaps = [below - above for below, above in pairwise(rows)]
    assert rows
    assert not gaps or max(gaps) <= 1.5 * min(gaps)
