"""Graphs of a training run over the last minutes, such as its samples/s and power."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample
from evener.training.noise_scale import NoiseScale, write_scale

from .cells import Line, Mark, Span, Tone, fit, pad, spread, text_lines
from .charts import nice_ceiling, samples_rate, short, watts, whole
from .time_graph import (
    PastTicks,
    TickWindow,
    axis_text,
    draw_columns,
    scale_short_history,
    shade_tone,
    ticks_per_dot,
)
from .trainings import TrainingRow

LEAST_WIDTH, LEAST_HEIGHT = 40, 5  # minimum size of a graph in cells
GOOD_HEIGHT = 8  # if graphs can be this high, they are stacked, because wider graphs show more time
GUTTER_CELLS = 6  # cells in front of each graph, for the ends of its axis
BETWEEN_CELLS = 2  # cells between graphs that are side by side
Values = tuple[float | None, ...]


class Graph(NamedTuple):
    """A graph's caption, values and axis.

    - `newest`: the newest value as text.
    - `level`: a value to mark with a horizontal line, such as the plan's samples/s; 0 for none.
    """

    caption: str
    newest: str
    values: Values
    top: float
    tone: Tone
    draw: Callable[[float], str] = short
    level: float = 0.0
    level_text: str = ""


class Reader(NamedTuple):
    """Reads stored values in the time window that the graphs show."""

    past: PastTicks
    window: TickWindow

    def read(self, key: str, metric: str) -> Values:
        """Return the values of a metric in the time window, oldest first."""
        return self.past.history(key, metric, self.window.newest)


def training_graph_lines(
    row: TrainingRow,
    samples: Sequence[DeviceSample],
    past: PastTicks,
    size: tuple[int, int],
    seconds: float,
    interval_seconds: float,
) -> tuple[Line, ...]:
    """Draw the graphs of a training run.

    - `past`: the stored readings.
    - `size`: width and height in cells.
    - `seconds`: the time span to show.
    - `interval_seconds`: the time between readings.

    If the monitor sees none of the run's devices, returns a sentence that says so. Returns no lines
    if there is no room.
    """
    width, height = size
    devices = {rank.device for rank in row.ranks}
    keys = {
        sample.device.label: sample.device.key
        for sample in samples
        if sample.device.label in devices
    }
    if not keys:
        sees = "The monitor sees none of its devices."
        why = sees if any(devices) else "The training names no device."
        return text_lines(why, width, 1, "dim")[:height]
    most = max(1, width // LEAST_WIDTH)
    captions = _list_captions(row, keys, most * (height // LEAST_HEIGHT))
    if not captions:
        return ()
    ticks = seconds / interval_seconds
    columns = max(_min_columns(len(captions), most, height), _max_columns(width, most, ticks))
    columns = min(len(captions), columns)
    cells = max(1, _graph_cells(width, columns))
    per_dot = ticks_per_dot(seconds, interval_seconds, cells)
    per_dot, stretch = scale_short_history(per_dot, past.ticks, cells)
    window = TickWindow(cells, per_dot, past.ticks, stretch)
    each = cells + GUTTER_CELLS
    reader = Reader(past, window)
    graphs = _make_graphs(row, keys, captions, reader)
    return _draw_graphs(graphs, reader, each, height, columns)


def _graph_cells(width: int, columns: int) -> int:
    """Return the width in cells of each graph if `columns` graphs are side by side."""
    return (width - BETWEEN_CELLS * (columns - 1)) // columns - GUTTER_CELLS


def _max_columns(width: int, limit: int, ticks: float) -> int:
    """Return how many graphs fit side by side, up to `limit`.

    Each graph needs a column of dots for each of the `ticks` readings.
    """
    fine = [each for each in range(1, limit + 1) if 2 * _graph_cells(width, each) >= ticks]
    return max(fine, default=1)


def _min_columns(count: int, limit: int, height: int) -> int:
    """Return how many graphs to put side by side, as few as possible, so that all are tall enough.

    `count` is the number of graphs, and `height` the height for all of them in lines. Returns at
    most `limit`, even if the graphs are too short then.
    """
    for columns in range(1, limit):
        if -(-count // columns) * GOOD_HEIGHT <= height:
            return columns
    return limit


ALL, POWER, NOISE = "all devices", "power", "noise scale"


def _list_captions(row: TrainingRow, keys: Mapping[str, str], max_graphs: int) -> list[str]:
    """Return the captions of the graphs to show, at most `max_graphs`.

    The first graph shows all devices together, unless some ranks don't report here. It is
    followed by one graph for each label in `keys`, if there is room for all of them, and by the
    graphs of power and noise scale, if these are known.
    """
    together = [] if row.missing_ranks else [ALL]
    each = [*keys] if len(keys) > 1 or not together else []
    others = [*([POWER] if row.watts else []), *([NOISE] if row.noise else [])]
    every = [*together, *each, *others]
    return every if len(every) <= max_graphs else [*together, *others][:max_graphs]


def _make_graphs(
    row: TrainingRow, keys: Mapping[str, str], captions: Sequence[str], reader: Reader
) -> list[Graph]:
    """Return the graphs with the given captions, in the same order.

    `keys` maps the label of each device to the key of its stored readings.
    """
    speeds = {label: reader.read(key, "samples_per_second") for label, key in keys.items()}
    top = nice_ceiling(_highest(speeds.values()))
    graphs = []
    for caption in captions:
        if caption == ALL:
            graphs.append(_graph_all(row, _add_values([*speeds.values()])))
        elif caption == POWER:
            graphs.append(_graph_power([reader.read(key, "power_watts") for key in keys.values()]))
        elif caption == NOISE and row.noise is not None:
            graphs.append(_graph_noise(row.noise, reader.read(row.training, "noise_scale")))
        else:
            values = speeds[caption]
            newest = samples_rate(_newest(values))
            graphs.append(Graph(caption, newest, values, top, "speed"))
    return graphs


def _graph_all(row: TrainingRow, values: Values) -> Graph:
    """Return the graph of the total samples/s, with a line at the plan's samples/s."""
    plan = row.plan_samples_per_second
    top = nice_ceiling(max(plan, _highest([values])))
    newest = samples_rate(row.samples_per_second)
    words = f"plan {rate(plan)}" if plan else ""
    return Graph(ALL, newest, values, top, "accent", level=plan, level_text=words)


def _graph_power(values: Sequence[Values]) -> Graph:
    summed = _add_values(values)
    top = nice_ceiling(_highest([summed]))
    return Graph(POWER, watts(_newest(summed)), summed, top, "power", whole)


def _graph_noise(noise: NoiseScale, values: Values) -> Graph:
    top = nice_ceiling(_highest([values]))
    return Graph(NOISE, write_scale(noise), values, top, "memory")


def _draw_graphs(
    graphs: Sequence[Graph], reader: Reader, width: int, height: int, columns: int
) -> tuple[Line, ...]:
    """Draw the graphs in rows of `columns` graphs each."""
    rows = -(-len(graphs) // columns)
    lines: list[Line] = []
    for row in range(rows):
        own = height * (row + 1) // rows - height * row // rows
        beside = graphs[row * columns : (row + 1) * columns]
        drawn = [_draw_graph(one, reader, width, own) for one in beside]
        for parts in zip(*drawn, strict=True):
            spans: list[Span] = []
            for place, part in enumerate(parts):
                spans += (*([Span(" " * BETWEEN_CELLS)] if place else []), *part)
            lines.append(Line(tuple(spans)))
    return tuple(lines)


def _draw_graph(graph: Graph, reader: Reader, width: int, height: int) -> list[tuple[Span, ...]]:
    """Return the lines of one graph, with its caption, columns and time axis."""
    rows = height - 2
    window = reader.window
    lines = draw_columns(window.dots(graph.values), 0.0, graph.top, rows)
    level = rows - 1 - min(rows - 1, int(graph.level / graph.top * rows)) if graph.level else -1
    drawn = [_caption(graph, width)]
    for row, text in enumerate(lines):
        label = {0: graph.draw(graph.top), rows - 1: "0"}.get(row, "")
        gutter = Span(f"{fit(label, GUTTER_CELLS - 1, 'right')} ", "dim")
        tone = shade_tone(graph.tone, (rows - row) / rows)
        drawn.append(
            (gutter, *(_draw_level_line(text, tone) if row == level else (Span(text, tone),)))
        )
    axis = axis_text(window.width, window, reader.past.times(window.newest))
    return [*drawn, (Span(" " * GUTTER_CELLS), Span(axis, "dim"))]


def _caption(graph: Graph, width: int) -> tuple[Span, ...]:
    """Return a graph's caption, its newest value, and the label of its horizontal line."""
    head = (Span(f" {graph.caption} ", "title"), Span(graph.newest, graph.tone))
    words = Span(f"{Mark.TRACK} {graph.level_text}" if graph.level_text else "", "warn")
    return spread(head, (words,), width).spans if graph.level_text else pad(head, width)


def _draw_level_line(text: str, tone: Tone) -> tuple[Span, ...]:
    """Draw a horizontal line through one row of a graph, in the cells that are empty.

    `text` is the row of the graph, and `tone` the tone of its other cells.
    """
    spans = []
    for sign in text:
        free = sign in " \u2800"
        spans.append(Span(Mark.TRACK if free else sign, "warn" if free else tone))
    return tuple(spans)


def _add_values(histories: Sequence[Values]) -> Values:
    """Add the values of several devices. A sum is None if one of its values is unknown."""
    return tuple(
        None if None in tick else sum(filter(None, tick)) for tick in zip(*histories, strict=True)
    )


def _newest(values: Values) -> float:
    return (values[-1] if values else None) or 0.0


def _highest(histories: Iterable[Values]) -> float:
    """Return the highest value of all devices, or 0 if none is known."""
    return max((value for values in histories for value in filter(None, values)), default=0.0)
