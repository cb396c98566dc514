"""The process table: what runs on the devices, sorted and filtered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from evener.devices.types import DeviceSample, ProcessSample, Reading
from evener.tui.text.formatting import rate
from evener.tui.view.cells import Line, Span, Tone
from evener.tui.view.figures import figure, short, short_bytes, whole
from evener.tui.view.marks import Marks
from evener.tui.view.table import NO_CURSOR, Column, Position, column_widths, heading, scrolled, table_row, text_cell


def _reading(
    reading: Callable[[ProcessSample], Reading], draw: Callable[[float], str], tone: Tone = "text"
) -> Callable[[ProcessSample, int, Marks], tuple[Span, ...]]:
    return lambda row, width, marks: (figure(reading(row), width, marks, draw, tone),)


def _speed(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (figure(row.samples_per_second, width, marks, rate if width >= 9 else short, "speed"),)


PROCESS_COLUMNS: tuple[Column[ProcessSample], ...] = (
    Column("pid", ("pid",), 7, text_cell(lambda row: str(row.pid), "strong")),
    Column("user", ("user",), 8, text_cell(lambda row: row.user), "left"),
    Column("device", ("device",), 6, text_cell(lambda row: row.device_label), "left"),
    Column("memory", ("memory", "mem"), 7, _reading(lambda row: row.memory_bytes, short_bytes, "memory")),
    Column("sm", ("SM %", "SM"), 5, _reading(lambda row: row.sm_percent, whole, "accent")),
    Column("cpu", ("CPU %", "CPU"), 6, _reading(lambda row: row.cpu_percent, whole)),
    Column("speed", ("samples/s", "smp/s"), 6, _speed),
    Column("command", ("command",), 10, text_cell(lambda row: row.command), "left"),
)
PROCESS_GROWTH = (("speed", 9), ("user", 12))
SORT_KEYS = tuple(column.key for column in PROCESS_COLUMNS)

_DESCENDING_FIRST = frozenset({"memory", "sm", "cpu", "speed"})


def descending_first(key: str) -> bool:
    """Whether a sort by this column starts with the largest, as it does for figures."""
    return key in _DESCENDING_FIRST


def _number(reading: Reading) -> float:
    return reading.value if reading.value is not None else -1.0


_ORDER: dict[str, Callable[[ProcessSample], float | str]] = {
    "pid": lambda row: float(row.pid),
    "user": lambda row: row.user.lower(),
    "device": lambda row: row.device_label,
    "memory": lambda row: _number(row.memory_bytes),
    "sm": lambda row: _number(row.sm_percent),
    "cpu": lambda row: _number(row.cpu_percent),
    "speed": lambda row: _number(row.samples_per_second),
    "command": lambda row: row.command.lower(),
}


def matches(row: ProcessSample, words: str) -> bool:
    """Whether every word is in the pid, user, device or command; case is ignored."""
    text = f"{row.pid} {row.user} {row.device_label} {row.command}".lower()
    return all(word in text for word in words.lower().split())


class Order(NamedTuple):
    """How the processes are sorted, and the action of a click on a title."""

    key: str = "memory"
    descending: bool = True
    action: str = ""


def arrange(rows: Sequence[ProcessSample], order: Order, words: str = "") -> tuple[ProcessSample, ...]:
    """The rows that match `words`, sorted; equal ones by pid, so that they keep their places."""
    kept = sorted((row for row in rows if matches(row, words)), key=lambda row: (row.pid, row.device_label))
    return tuple(sorted(kept, key=_ORDER[order.key], reverse=order.descending))


def identity(row: ProcessSample) -> tuple[int, float, str]:
    """What identifies a row between two ticks: a pid may be reused, with another start time."""
    return (row.pid, row.start_time, row.device_id)


def nothing_there(devices: Sequence[DeviceSample]) -> str:
    """Why no process is shown: on CPU slices only trainings that report themselves can be seen."""
    if devices and all(sample.device.kind == "cpu" for sample in devices):
        return "No training reports itself here (evener.report; in Keras Report(split))."
    return "No process is on these devices."


def process_lines(
    rows: Sequence[ProcessSample],
    width: int,
    height: int,
    marks: Marks,
    position: Position = NO_CURSOR,
    order: Order | None = None,
    nothing: str = "",
) -> tuple[tuple[Line, ...], int]:
    """The heading and as many rows as fit in `height`, and the first row shown; `nothing` replaces missing rows."""
    widths = column_widths(PROCESS_COLUMNS, PROCESS_GROWTH, {"command": 1000}, width - 1)
    by = order or Order("")
    head = heading(PROCESS_COLUMNS, widths, marks, sorted_by=by.key, descending=by.descending, action=by.action)
    if not rows:
        return (head, Line((Span(f" {nothing}", "dim"),))), 0

    def draw(row: ProcessSample, here: bool) -> Line:
        return table_row(PROCESS_COLUMNS, widths, row, marks, cursor=here)

    return scrolled(head, rows, draw, height, position)
