"""Charts of measured points and curves, drawn with braille dots.

A cell has two columns and four rows of dots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..text.ticks import round_ticks
from .cells import Line, Mark, Span, Tone, cells, cut, join_spans, pad, span_cells
from .charts import nice_ceiling, short, whole

# bits of a braille character by column and row of the dot, counted from the top left
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BRAILLE = 0x2800
LEAST_WIDTH, LEAST_HEIGHT = 24, 5  # minimum size of a readable chart in cells
CELLS_PER_TICK = 8, 2  # minimum distance of ticks along x and y, so that labels don't touch
_DASH = 3  # where a curve is a prediction, one of this many dots is drawn
_HATCH = "╱"


class PlotPoint(NamedTuple):
    """A measured point in a chart.

    `low` and `high` are the ends of its confidence interval, or None. `text` is shown when the
    cursor is on the point.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""


class Series(NamedTuple):
    """The points and the curve of one colour in a chart.

    Above x = `known_to`, the curve is a prediction and drawn with gaps.
    """

    label: str
    tone: Tone
    points: tuple[PlotPoint, ...] = ()  # what was measured
    line: tuple[tuple[float, float], ...] = ()  # x and y of the curve's vertices
    known_to: float = math.inf
    sign: str = ""  # drawn at each point; empty: a dot


class Zone(NamedTuple):
    """A hatched range of x values, such as batch sizes that run out of memory."""

    low: float
    high: float = math.inf
    label: str = ""
    tone: Tone = "bad"


class Axis(NamedTuple):
    """A linear or base-2 logarithmic axis."""

    low: float
    high: float
    log2: bool = False

    def place(self, number: float) -> float:
        """Return the position of a value along the axis, from 0 to 1."""
        number = max(self.low, min(self.high, number))
        if self.log2:
            share = math.log2(number / self.low) / math.log2(self.high / self.low)
        else:
            share = (number - self.low) / (self.high - self.low)
        return max(0.0, min(1.0, share))

    def ticks(self, max_ticks: int) -> list[float]:
        """Return round values for ticks on the axis, about `max_ticks` of them."""
        if not self.log2:
            steps = round_ticks(self.high - self.low, max_ticks)
            return [self.low + step for step in steps]
        first = math.ceil(math.log2(self.low) - 1e-9)
        last = math.floor(math.log2(self.high) + 1e-9)
        every = max(1, -(-(last - first + 1) // max(1, max_ticks)))
        return [2.0**power for power in range(first, last + 1, every)]


def make_axis(numbers: Iterable[float], *, log2: bool) -> Axis:
    """Return an axis with round ends that covers all values. A linear axis begins at 0.

    Ignores values that aren't finite. A logarithmic axis also ignores 0 and negative values.
    """
    usable = [number for number in numbers if math.isfinite(number) and (number > 0 or not log2)]
    if log2:
        low = 2.0 ** math.floor(math.log2(min(usable, default=1.0)))
        high = 2.0 ** math.ceil(math.log2(max(usable, default=2.0)))
        return Axis(low, high if high > low else low * 2, log2=True)
    highest = max(usable, default=1.0)
    step = nice_ceiling(highest / 8)
    return Axis(0.0, max(step, math.ceil(highest / step - 1e-9) * step))


class Chart(NamedTuple):
    """The contents of a chart.

    `cursor` is the x value of the points whose values are shown, or None. `draw_x` and `draw_y`
    format the labels of the axes.
    """

    series: tuple[Series, ...] = ()
    zones: tuple[Zone, ...] = ()
    x_caption: str = ""
    y_caption: str = ""
    log2_x: bool = True
    log2_y: bool = True
    cursor: float | None = None
    nothing: str = "Nothing was measured yet."  # message for a chart without points
    draw_x: Callable[[float], str] = whole
    draw_y: Callable[[float], str] = short

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(one.points or one.line for one in self.series)

    def stops(self) -> tuple[float, ...]:
        """Return the sorted x values of all points."""
        return tuple(sorted({point.x for one in self.series for point in one.points}))

    def read_out(self) -> tuple[tuple[Series, PlotPoint], ...]:
        """Return the points at the cursor, each with the series that it belongs to."""
        return tuple(
            (one, point) for one in self.series for point in one.points if point.x == self.cursor
        )

    def axes(self) -> tuple[Axis, Axis]:
        """Return the x axis and the y axis, which cover all points, curves and zones."""
        across: list[float] = [zone.low for zone in self.zones]
        up: list[float] = []
        for one in self.series:
            across += [x for x, _ in one.line] + [point.x for point in one.points]
            up += [y for _, y in one.line] + [point.y for point in one.points]
            up += [point.high for point in one.points if point.high is not None]
        return make_axis(across, log2=self.log2_x), make_axis(up, log2=self.log2_y)


class Canvas:
    """A drawing of braille dots, with text in front of the dots and behind them."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._bits = [[0] * width for _ in range(height)]
        self._tones: list[list[Tone]] = [["text"] * width for _ in range(height)]
        self._behind: dict[tuple[int, int], tuple[str, Tone]] = {}
        self._front: dict[tuple[int, int], tuple[str, Tone]] = {}

    def dot(self, x: int, y: int, tone: Tone) -> None:
        """Set a dot, and give its cell the tone. Dots outside the canvas are ignored."""
        column, row = x // 2, y // 4
        if 0 <= column < self.width and 0 <= row < self.height:
            self._bits[row][column] |= DOTS[x % 2][y % 4]
            self._tones[row][column] = tone

    def stroke(
        self, start: tuple[int, int], end: tuple[int, int], tone: Tone, step_size: int
    ) -> None:
        """Draw a straight line from `start` to `end`, using only every `step_size`-th dot."""
        across, down = end[0] - start[0], end[1] - start[1]
        steps = max(abs(across), abs(down), 1)
        for step in range(0, steps + 1, step_size):
            x = start[0] + round(across * step / steps)
            y = start[1] + round(down * step / steps)
            self.dot(x, y, tone)

    def write(self, column: int, row: int, text: str, tone: Tone, *, behind: bool = False) -> None:
        """Write text that begins at a cell. Dots cover it if `behind` is set."""
        layer = self._behind if behind else self._front
        for place, sign in enumerate(text, column):
            if 0 <= place < self.width and 0 <= row < self.height:
                layer[place, row] = sign, tone

    def row(self, row: int) -> tuple[Span, ...]:
        """Return a row of cells as spans."""
        spans = []
        for column in range(self.width):
            bits = self._bits[row][column]
            sign: tuple[str, Tone] = (chr(BRAILLE + bits), self._tones[row][column])
            if not bits:
                sign = self._behind.get((column, row), (" ", "text"))
            spans.append(Span(*self._front.get((column, row), sign)))
        return tuple(Span(*part) for part in join_spans(spans))


class Frame(NamedTuple):
    """The axes of a chart, and the size of its plot in cells."""

    x: Axis
    y: Axis
    left: int  # cells to the left of the plot, for the y labels and the axis
    width: int  # cells of the plot
    height: int

    def column(self, number: float) -> int:
        """Return the column of cells that shows the x value `number`."""
        return self.dots(number, self.y.low)[0] // 2

    def y_ticks(self) -> list[float]:
        """Return the values to label on the y axis."""
        # A label takes a whole line, so its position is rounded. If that makes the distances
        # between labels uneven, fewer values are returned.
        ticks: list[float] = []
        for most in range(max(3, self.height // CELLS_PER_TICK[1]), 0, -1):
            ticks = self.y.ticks(most)
            rows = [self.row(tick) for tick in ticks]
            gaps = [below - above for below, above in pairwise(rows)]
            if max(gaps, default=0) - min(gaps, default=0) <= max(gaps, default=0) // 4:
                break
        return ticks

    def row(self, number: float) -> int:
        """Return the row of cells that shows the y value `number`, counted from the top."""
        return self.dots(self.x.low, number)[1] // 4

    def dots(self, x: float, y: float) -> tuple[int, int]:
        """Return the position of a point in columns and rows of dots, counted from the top left."""
        across = round(self.x.place(x) * (self.width * 2 - 1))
        up = round(self.y.place(y) * (self.height * 4 - 1))
        return across, self.height * 4 - 1 - up


def frame_chart(chart: Chart, width: int, height: int) -> Frame:
    """Lay out a chart in `width` x `height` cells, and return its axes and the size of its plot."""
    x, y = chart.axes()
    rows = max(1, height - 3)
    ticks = Frame(x, y, 0, width, rows).y_ticks()
    labels = [chart.draw_y(tick) for tick in ticks]
    left = max(map(cells, labels), default=1) + 2
    return Frame(x, y, left, max(1, width - left), rows)


def draw_chart(chart: Chart, width: int, height: int) -> tuple[Line, ...]:
    """Draw a chart with a legend, the plot, and both axes.

    Returns no lines if there are fewer than 24 x 5 cells, and a message if the chart is empty.
    """
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return ()
    if chart.is_empty:
        return (Line((Span(f" {cut(chart.nothing, width - 2)}", "dim"),)),)
    frame = frame_chart(chart, width, height)
    canvas = Canvas(frame.width, frame.height)
    for zone in chart.zones:
        _hatch(canvas, frame, zone)
    for one in chart.series:
        _draw_line(canvas, frame, one)
    for one in chart.series:
        _draw_points(canvas, frame, one)
    if chart.cursor is not None:
        _draw_cursor(canvas, frame, chart)
    plot = (Line((*head, *canvas.row(row))) for row, head in enumerate(_y_labels(chart, frame)))
    return (_legend(chart, width), *plot, *_x_axis(chart, frame, width))


def _hatch(canvas: Canvas, frame: Frame, zone: Zone) -> None:
    first = frame.column(zone.low)
    last = frame.width - 1 if math.isinf(zone.high) else frame.column(zone.high)
    for row in range(frame.height):
        canvas.write(first, row, _HATCH * (last - first + 1), "track", behind=True)
        canvas.write(first, row, "┆", zone.tone, behind=True)
    beside = first + 2 if cells(zone.label) < last - first else first - cells(zone.label) - 1
    canvas.write(max(0, beside), 0, zone.label, zone.tone, behind=True)


def _draw_line(canvas: Canvas, frame: Frame, series: Series) -> None:
    places = [(x, frame.dots(x, y)) for x, y in series.line]
    for (_, start), (x, end) in pairwise(places):
        canvas.stroke(start, end, series.tone, 1 if x <= series.known_to else _DASH)


def _draw_points(canvas: Canvas, frame: Frame, series: Series) -> None:
    for point in series.points:
        x, y = frame.dots(point.x, point.y)
        if point.low is not None and point.high is not None:
            low, high = frame.dots(point.x, point.low), frame.dots(point.x, point.high)
            canvas.stroke(high, low, series.tone, 1)
        if series.sign:
            canvas.write(x // 2, y // 4, series.sign[0], series.tone)
        else:
            canvas.dot(x, y, series.tone)


def _draw_cursor(canvas: Canvas, frame: Frame, chart: Chart) -> None:
    assert chart.cursor is not None
    column = frame.column(chart.cursor)
    for row in range(frame.height):
        canvas.write(column, row, "│", "strong", behind=True)
    for one, point in chart.read_out():
        row = frame.dots(point.x, point.y)[1] // 4
        canvas.write(column, row, one.sign[:1] or Mark.RUNNING, "strong")


def _legend(chart: Chart, width: int) -> Line:
    """Return the caption of the y axis and the labels of the series."""
    # Labels that don't fit are only counted.
    named = [one for one in chart.series if one.label]
    spans = [Span(f" {chart.y_caption}  ", "title")]
    for place, one in enumerate(named):
        entry = f"{one.sign[:1] or Mark.FULL} {one.label}  "
        rest = f"+{len(named) - place}"
        if span_cells(spans) + cells(entry) + len(rest) > width:
            spans.append(Span(rest, "dim"))
            break
        spans.append(Span(entry, one.tone))
    return Line(pad(tuple(spans), width))


def _y_labels(chart: Chart, frame: Frame) -> Iterator[tuple[Span, ...]]:
    """Yield the label and the piece of the axis that are drawn to the left of each row."""
    labels = {frame.row(tick): chart.draw_y(tick) for tick in frame.y_ticks()}
    for row in range(frame.height):
        label = labels.get(row, "")
        yield (
            Span(label.rjust(frame.left - 1), "dim"),
            Span("┤" if label else "│", "track"),
        )


def _x_axis(chart: Chart, frame: Frame, width: int) -> tuple[Line, Line]:
    """Return the x axis and the line of labels below it."""
    axis = ["─"] * frame.width
    labels = [" "] * (frame.left + frame.width)
    caption = f" {chart.x_caption}" if chart.x_caption else ""
    taken = 0
    for tick in frame.x.ticks(max(2, frame.width // CELLS_PER_TICK[0])):
        column, label = frame.column(tick), chart.draw_x(tick)
        start = max(taken, frame.left + column - len(label) // 2)
        axis[column] = "┬"
        if start + len(label) <= len(labels) - len(caption):
            labels[start : start + len(label)] = label
            taken = start + len(label) + 1
    text = "".join(labels)
    text = text[: len(text) - len(caption)] + caption if caption else text
    below = Line(pad((Span(text, "dim"),), width))
    return Line((Span(" " * (frame.left - 1)), Span("└" + "".join(axis), "track"))), below


def nearest(stops: Sequence[float], frame: Frame, column: int) -> float | None:
    """Return which of `stops` is drawn nearest to `column`, or None if `stops` is empty."""
    return min(stops, key=lambda stop: abs(frame.column(stop) - column), default=None)


def read_out_line(chart: Chart, width: int) -> Line:
    """Return a line with the values at the cursor or, without any, a hint about the cursor keys."""
    found = chart.read_out()
    if not found:
        hint = "← → read the points" if chart.stops() else ""
        return Line(pad((Span(f" {hint}", "dim"),), width))
    spans = [Span(f" {Mark.CURSOR} {chart.draw_x(found[0][1].x)} {chart.x_caption}  ", "strong")]
    for one, point in found:
        words = point.text or chart.draw_y(point.y)
        spans += [Span(f"{one.label} ", one.tone), Span(f"{words}   ")]
    return Line(pad(tuple(spans), width))
