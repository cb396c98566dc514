"""The Balance screen's rows, one a device: what is measured on it, how it is, its best alone, where memory ends."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.session_state import BalanceState, best_solo, memory_wall, own_speed
from evener.devices.types import DeviceSample
from evener.tui.text.formatting import percent, rate
from evener.tui.view.cells import Line, Span, Tone, cells, clean, cut, device_tone, span_cells
from evener.tui.view.devices import DEVICE_COLUMNS, DeviceRow
from evener.tui.view.marks import Marks
from evener.tui.view.table import Column, column_widths, heading, table_row, window

WIDE = 100  # columns, from which the memory in use has a column too
_SENSES = {column.key: column for column in DEVICE_COLUMNS}


class Lane:
    """One device's row: the state, which device it is, and its newest sample where there is one."""

    def __init__(self, state: BalanceState, device: int, sample: DeviceSample | None) -> None:
        self.state = state
        self.device = device
        self.sample = sample
        self.running = next((each for each in state.running if each.probe.layout.shares[device]), None)


def _name(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    label = lane.state.devices[lane.device]
    name = lane.state.names[lane.device] if lane.device < len(lane.state.names) else ""
    fill = marks.fills[lane.device % len(marks.fills)]
    room = width - cells(label) - 3
    return (
        Span(f"{fill} ", device_tone(lane.device)),
        Span(label, "strong"),
        Span(f" {cut(clean(name), max(0, room), marks.ellipsis)}" if room > 3 else "", "dim"),
    )


def _doing(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    running = lane.running
    if running is None:
        done = lane.state.ended or lane.state.finished is not None
        return (Span(f"{marks.done} done" if done else f"{marks.waiting} waits", "dim"),)
    words = f"{running.probe.stage}: {running.phase}"
    return Span(f"{marks.running} ", "speed"), Span(words if len(words) + 2 <= width else running.probe.stage)


def _sensed(key: str, lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    """The cell that the Monitor screen has for the same metric."""
    if lane.sample is None:
        return (Span(marks.none, "dim"),)
    return _SENSES[key].draw(DeviceRow(lane.sample), width, marks)


def _utilization(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    return _sensed("util", lane, width, marks)


def _temperature(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    return _sensed("temperature", lane, width, marks)


def _memory(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    return _sensed("memory", lane, width, marks)


def _batch(lane: Lane, _width: int, _marks: Marks) -> tuple[Span, ...]:
    if lane.running is None:
        return (Span(""),)
    return (Span(str(lane.running.probe.layout.shares[lane.device])),)


def _speed(lane: Lane, _width: int, _marks: Marks) -> tuple[Span, ...]:
    running = lane.running
    if running is None or running.samples_per_second is None:
        return (Span(""),)
    return (Span(rate(own_speed(running, lane.device)), "speed"),)


def _interval(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    running = lane.running
    if running is None or running.relative_interval is None:
        return (Span(""),)
    settled: Tone = "good" if running.relative_interval <= 0.01 else "text"
    text = f"{marks.plus_minus}{percent(running.relative_interval, 1)}"
    rounder = f"{marks.plus_minus}{percent(running.relative_interval)}"
    return (Span(text if cells(text) <= width else rounder, settled),)


def _alone(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    solo = best_solo(lane.state, lane.device)
    if solo is None:
        return (Span(marks.none, "dim"),)
    spans = (Span(rate(solo.samples_per_second), "strong"), Span(f" at {solo.probe.layout.global_batch}", "dim"))
    return spans if span_cells(spans) <= width else spans[:1]


def _fits(lane: Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    """The largest batch that fits and the smallest that ran out of memory, between them the wall; none is ever cut."""
    wall = memory_wall(lane.state, lane.device)
    belief = lane.state.belief
    sketch = next((each for each in belief.curves if each.device == lane.device), None) if belief else None
    largest = sketch.largest_batch if sketch is not None else None
    if wall is None:
        return (Span(f"{largest} fits"),) if largest is not None else (Span(marks.none, "dim"),)
    known = "" if largest is None else str(largest)
    forms = (
        (Span(f"{known} fits, " if known else ""), Span(f"{wall} not", "bad")),
        (Span(known), Span(f"{marks.wall}{wall}", "bad")),
    )
    return next((form for form in forms if span_cells(form) <= width), forms[-1][1:])


_PROBED: tuple[Column[Lane], ...] = (
    Column("batch", ("batch",), 6, _batch),
    Column("speed", ("samples/s", "smp/s"), 7, _speed),
    Column("interval", ("interval", "known"), 7, _interval),
    Column("alone", ("best alone", "alone"), 14, _alone),
    Column("fits", ("largest batch", "largest"), 11, _fits),
)
_SHOWN: tuple[Column[Lane], ...] = (
    Column("device", ("device",), 8, _name, "left"),
    Column("doing", ("doing",), 8, _doing, "left"),
)
_SENSED: tuple[Column[Lane], ...] = (
    Column("util", ("utilisation", "util"), 4, _utilization),
    Column("temperature", ("temp", "°C"), 3, _temperature),
    Column("memory", ("memory", "mem"), 7, _memory),
)
_GROWTH = (
    ("doing", 18),
    ("speed", 9),
    ("temperature", 5),
    ("util", 6),
    ("device", 17),
    ("fits", 18),
    ("interval", 8),
    ("memory", 11),
    ("util", 14),
    ("fits", 22),
    ("doing", 26),
    ("memory", 20),
)
_SPARED = ("interval", "doing", "alone", "temperature", "batch")  # in this order, where not even the least fits


def lane_columns(width: int, *, sensed: bool) -> tuple[Column[Lane], ...]:
    """The columns in `width` cells; what the devices tell is left out where nothing is sampled, as in a replay."""
    senses = (_SENSED if width >= WIDE else _SENSED[:2]) if sensed else ()
    columns = (*_SHOWN, *senses, *_PROBED)
    for spared in _SPARED:
        if sum(column.least + 1 for column in columns) <= width:
            break
        columns = tuple(column for column in columns if column.key != spared)
    return columns


def lane_lines(
    state: BalanceState,
    width: int,
    height: int,
    marks: Marks,
    *,
    samples: Sequence[DeviceSample | None] = (),
    cursor: int = 0,
    top: int = 0,
    active: bool = False,
) -> tuple[tuple[Line, ...], int]:
    """The heading and a row for each device as far as they fit, and the first row shown.

    `samples`: each device's newest, in the devices' order; none in a replay.
    """
    columns = lane_columns(width, sensed=bool(samples))
    growth = [step for step in _GROWTH if any(column.key == step[0] for column in columns)]
    widths = column_widths(columns, growth, {"device": 34}, width - 1)
    newest = [*samples, *[None] * len(state.devices)]
    lanes = [Lane(state, device, newest[device]) for device in range(len(state.devices))]
    room = max(0, height - 1)
    first = window(len(lanes), cursor, room, top)
    rows = [
        table_row(columns, widths, lane, marks, cursor=active and lane.device == cursor)
        for lane in lanes[first : first + room]
    ]
    return (heading(columns, widths, marks), *rows), first
