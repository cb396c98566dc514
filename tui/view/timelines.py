"""The Monitor screen's graphs: metrics of each device over the last minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from evener.devices.sampler import HISTORY_TICKS
from evener.devices.types import DeviceSample, Reading

from .cells import Line, Mark, Span, Tone, cut, fit, pad
from .charts import gib, nice_ceiling, reading_text, short, temperature_tone, whole
from .devices import short_name
from .time_graph import PastTicks, TickWindow, axis_text, draw_columns, mean, shade_tone, time_at

LABEL_CELLS = 9  # cells for a device's label in front of its graphs
GUTTER_CELLS = 6  # cells in front of each graph: its newest value, and the ends of its axis
LEAST_GRAPH = 14  # minimum width of a graph; columns of narrower graphs are left out
LEAST_ROWS, MOST_ROWS = 2, 30  # lines of a graph
MIDDLE_ROWS = 5  # graphs with this number of lines, or more, also label the middle of the axis
COLDEST = 20.0  # °C, the lower end of the temperature axis


class GraphMetric(NamedTuple):
    """A metric that has a graph.

    `top` returns the upper end of the axis for a device. If it returns None, the axis ends at a
    round number above all values.
    """

    title: str
    field: str
    tone: Tone
    draw: Callable[[float], str]
    top: Callable[[DeviceSample], float | None]  # None: a round value above all values
    low: float = 0.0


METRICS = (
    GraphMetric("utilisation %", "utilization_percent", "accent", whole, lambda _: 100.0),
    GraphMetric(
        "temperature °C",
        "temperature_celsius",
        "heat",
        whole,
        lambda sample: sample.temperature_limit_celsius.value or 100.0,
        COLDEST,
    ),
    GraphMetric("samples/s", "samples_per_second", "speed", short, lambda _: None),
    GraphMetric(
        "memory GiB", "memory_used_bytes", "memory", gib, lambda each: each.memory_total_bytes.value
    ),
    GraphMetric(
        "power W", "power_watts", "power", whole, lambda each: each.power_limit_watts.value
    ),
)


class TimeView(NamedTuple):
    """The user's choices for the graphs, such as the scale and the cursor.

    `per_dot` is the number of readings per column of dots. `cursor` is a cell, counted from the
    sampler's first reading, or None.
    """

    per_dot: int = 1
    cursor: int | None = None
    common_top: bool = False  # True if each metric has one scale for all devices
    chosen: str = ""  # the key of the device under the list's cursor
    stretch: int = 1  # columns of dots per tick, for a short history


class GraphPlan(NamedTuple):
    """The devices and metrics that have graphs, and the sizes of the graphs."""

    metrics: tuple[GraphMetric, ...]
    devices: tuple[DeviceSample, ...]
    rows: tuple[int, ...]  # height of each device's graphs in lines
    graph: int  # cells of one graph
    label: int = LABEL_CELLS

    def cell_at(self, x: int) -> int | None:
        """Return the cell of a graph that is at the screen column `x`, or None between graphs.

        Cells are counted from the graph's left edge.
        """
        each = GUTTER_CELLS + self.graph + 1
        within = (x - self.label) % each - GUTTER_CELLS
        inside = self.label <= x < self.label + each * len(self.metrics)
        return within if inside and 0 <= within < self.graph else None


def place_graphs(
    samples: Sequence[DeviceSample], past: PastTicks, width: int, height: int, chosen_key: str = ""
) -> GraphPlan | None:
    """Choose the devices and metrics whose graphs fit on the screen, and the size of the graphs.

    The device with the key `chosen_key` is always among them. `past` has the stored readings.
    Returns None if there is no room or nothing to show.
    """
    # Only metrics in the stored readings (`past`), or reported now, have graphs.
    metrics = [
        each for each in METRICS if any(_has_reported(sample, each, past) for sample in samples)
    ]
    room = height - 2  # without the heading and the time axis
    most = max(0, (width - LABEL_CELLS) // (GUTTER_CELLS + LEAST_GRAPH + 1))
    metrics = metrics[:most]
    if not metrics or room < LEAST_ROWS:
        return None
    shown = min(len(samples), room // LEAST_ROWS)
    keys = [sample.device.key for sample in samples]
    place = keys.index(chosen_key) if chosen_key in keys else 0
    first = max(0, min(place - shown // 2, len(samples) - shown))
    room = min(room, shown * MOST_ROWS)
    rows = tuple(room * (each + 1) // shown - room * each // shown for each in range(shown))
    each = (width - LABEL_CELLS) // len(metrics)
    graph, label = each - GUTTER_CELLS - 1, width - each * len(metrics)
    return GraphPlan(tuple(metrics), tuple(samples[first : first + shown]), rows, graph, label)


def _has_reported(sample: DeviceSample, metric: GraphMetric, past: PastTicks) -> bool:
    """Return whether a device reports a metric now, or has done so in a stored reading.

    A metric whose axis has no fixed upper end, such as samples/s, counts only if it isn't 0.
    """
    value = getattr(sample, metric.field).value
    if value or (value is not None and metric.top(sample)):
        return True  # a metric without an upper end, such as samples/s, isn't drawn while it is 0
    return any(past.history(sample.device.key, metric.field, HISTORY_TICKS))


Histories = dict[tuple[str, str], tuple[float | None, ...]]  # by device and field


def draw_timelines(
    plan: GraphPlan, past: PastTicks, view: TimeView, width: int
) -> tuple[Line, ...]:
    """Draw a heading, the graphs of each device, and the time axis."""
    window = TickWindow(plan.graph, view.per_dot, past.ticks, view.stretch)
    column = None if view.cursor is None else view.cursor - window.first_cell
    if column is not None and not 0 <= column < plan.graph:
        column = None
    histories = _read_past(plan, past, window.newest)
    tops = _common_tops(plan, histories) if view.common_top else {}
    lines = [_heading(plan, width)]
    for sample, rows in zip(plan.devices, plan.rows, strict=True):
        parts = [_draw_label(sample, rows, plan.label, sample.device.key == view.chosen)]
        for metric in plan.metrics:
            values = histories[sample.device.key, metric.field]
            top = tops.get(metric.field) or _axis_top(sample, metric, values)
            parts.append([*_draw_graph(sample, metric, top, window.dots(values), rows, column)])
        lines += _join_parts(parts, width)
    return (*lines, _draw_time_axis(plan, window, past.times(window.newest), column, width))


def _read_past(plan: GraphPlan, past: PastTicks, newest: int) -> Histories:
    """Return the stored values of each device and metric, up to `newest` values each."""
    histories: Histories = {}
    for sample in plan.devices:
        for metric in plan.metrics:
            key = sample.device.key
            histories[key, metric.field] = past.history(key, metric.field, newest)
    return histories


def _join_parts(parts: Sequence[Sequence[tuple[Span, ...]]], width: int) -> Iterator[Line]:
    """Put blocks of lines side by side, and yield the joined lines."""
    for row in zip(*parts, strict=True):
        yield Line(pad(tuple(span for part in row for span in part), width))


def _common_tops(plan: GraphPlan, histories: Histories) -> dict[str, float]:
    """Return, for each metric, the upper end of the axis that all devices share."""
    # It is the highest of the ends that the axes of the single devices would have.
    tops: dict[str, float] = {}
    for sample in plan.devices:
        for metric in plan.metrics:
            own = _axis_top(sample, metric, histories[sample.device.key, metric.field])
            tops[metric.field] = max(own, tops.get(metric.field, 0.0))
    return tops


def _axis_top(sample: DeviceSample, metric: GraphMetric, values: Sequence[float | None]) -> float:
    """Return the upper end of a metric's axis for one device.

    If the metric has no fixed upper end, this is a round number that is at least the highest of
    `values`.
    """
    given = metric.top(sample)
    if given:
        return given
    return nice_ceiling(max((number for number in values if number is not None), default=1.0))


def _heading(plan: GraphPlan, width: int) -> Line:
    spans = [Span(" " * plan.label)]
    for metric in plan.metrics:
        title = fit(metric.title, plan.graph + 1)
        spans += [Span(" " * GUTTER_CELLS), Span(title, "title")]
    return Line(pad(tuple(spans), width))


def _draw_label(
    sample: DeviceSample, rows: int, width: int, is_chosen: bool
) -> list[tuple[Span, ...]]:
    """Return lines with a device's label and product name, to draw to the left of its graphs."""
    room = width - 2
    label = cut(sample.device.label.rpartition("/")[2], room)
    mark = Mark.CURSOR if is_chosen else " "
    first = (Span(mark, "strong"), Span(fit(label, room), "strong"), Span(" "))
    product = short_name(sample.device.name)
    if len(product) > room:
        product = product.removeprefix("GTX ").removeprefix("RTX ")
    name = (Span(" "), Span(fit(product, room), "dim"), Span(" "))
    blank = (Span(" " * width),)
    return [first, name, *[blank] * rows][:rows]


def _draw_graph(
    sample: DeviceSample,
    metric: GraphMetric,
    top: float,
    dots: Sequence[float | None],
    rows: int,
    column: int | None,
) -> Iterator[tuple[Span, ...]]:
    """Yield the lines of a graph. The cursor is drawn at `column`, unless that is None.

    `dots` has a value for each column of dots.
    """
    gutter = _draw_gutter(sample, metric, top, dots, rows, column)
    for row, text in enumerate(draw_columns(dots, metric.low, top, rows)):
        tone = _row_tone(sample, metric, top, rows, row)
        graph: tuple[Span, ...] = (Span(text, tone),)
        if column is not None:
            here = text[column] if text[column] not in " \u2800" else "│"
            graph = (
                Span(text[:column], tone),
                Span(here, "strong"),
                Span(text[column + 1 :], tone),
            )
        yield (*gutter[row], *graph, Span(" "))


def _row_tone(sample: DeviceSample, metric: GraphMetric, top: float, rows: int, row: int) -> Tone:
    """Return the tone for one row of a graph. Rows of high temperatures get a warning tone."""
    height = (rows - row) / rows
    if metric.field == "temperature_celsius":
        heat = temperature_tone(sample)(metric.low + (top - metric.low) * (height - 0.5 / rows))
        if heat != "text":
            return heat
    return shade_tone(metric.tone, height)


def _draw_gutter(
    sample: DeviceSample,
    metric: GraphMetric,
    top: float,
    dots: Sequence[float | None],
    rows: int,
    column: int | None,
) -> list[tuple[Span, ...]]:
    """Return the labels to the left of a graph: the ends of its axis, and the newest value.

    If `column` isn't None, the value at the cursor replaces the newest one.
    """
    room = GUTTER_CELLS - 1
    if column is None:
        drawn = _draw_value(getattr(sample, metric.field), metric, room)
    else:
        then = mean(dots[2 * column : 2 * column + 2])
        drawn = Span(Mark.NONE if then is None else metric.draw(then), "strong")
    texts = [Span("")] * rows
    texts[-1] = Span(whole(metric.low), "dim")
    if rows > LEAST_ROWS:
        texts[0] = Span(metric.draw(top), "dim")
    if rows >= MIDDLE_ROWS:
        texts[rows // 2] = Span(metric.draw((top + metric.low) / 2), "dim")
    texts[1 if rows > LEAST_ROWS else 0] = drawn
    return [(Span(fit(text.text, room, "right"), text.tone), Span(" ")) for text in texts]


def _draw_value(reading: Reading, metric: GraphMetric, room: int) -> Span:
    text, current = reading_text(reading, metric.draw, room)
    return Span(text, "strong" if current else "dim")


def _draw_time_axis(
    plan: GraphPlan, window: TickWindow, times: Sequence[float], column: int | None, width: int
) -> Line:
    """Draw a time axis below each column of graphs. With a cursor, it shows the cursor's time."""
    then = time_at(window, times, column) if column is not None else None
    if column is None or then is None:
        each: tuple[Span, ...] = (Span(axis_text(plan.graph, window, times), "dim"),)
    else:
        label = time.strftime("%H:%M:%S", time.localtime(then))
        start = max(0, min(column - len(label) // 2, plan.graph - len(label)))
        after = plan.graph - start - len(label)
        each = (Span("─" * start, "dim"), Span(label, "strong"), Span("─" * after, "dim"))
    spans: list[Span] = [Span(" " * plan.label)]
    for _ in plan.metrics:
        spans += [Span(" " * GUTTER_CELLS), *each, Span(" ")]
    return Line(pad(tuple(spans), width))
