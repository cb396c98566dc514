"""The process table: what runs on the devices, sorted and filtered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.devices.types import DeviceSample, ProcessSample, Reading
from evener.tui.text.formatting import rate
from evener.tui.view.cells import Line, Span, clean, cut
from evener.tui.view.figures import figure, short, short_bytes, whole
from evener.tui.view.marks import Marks
from evener.tui.view.table import Column, column_widths, heading, table_row, window


def _pid(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (Span(cut(str(row.pid), width, marks.ellipsis), "strong"),)


def _user(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (Span(cut(clean(row.user, 40), width, marks.ellipsis)),)


def _device(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (Span(cut(clean(row.device_label, 20), width, marks.ellipsis)),)


def _memory(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (figure(row.memory_bytes, width, marks, short_bytes, "memory"),)


def _sm(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (figure(row.sm_percent, width, marks, whole, "accent"),)


def _cpu(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (figure(row.cpu_percent, width, marks, whole),)


def _speed(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (figure(row.samples_per_second, width, marks, rate if width >= 9 else short, "speed"),)


def _command(row: ProcessSample, width: int, marks: Marks) -> tuple[Span, ...]:
    return (Span(cut(clean(row.command, 400), width, marks.ellipsis)),)


PROCESS_COLUMNS: tuple[Column[ProcessSample], ...] = (
    Column("pid", ("pid",), 7, _pid),
    Column("user", ("user",), 8, _user, "left"),
    Column("device", ("device",), 6, _device, "left"),
    Column("memory", ("memory", "mem"), 7, _memory),
    Column("sm", ("SM %", "SM"), 5, _sm),
    Column("cpu", ("CPU %", "CPU"), 6, _cpu),
    Column("speed", ("samples/s", "smp/s"), 6, _speed),
    Column("command", ("command",), 10, _command, "left"),
)
PROCESS_GROWTH = (("speed", 9), ("user", 12))
SORT_KEYS = tuple(column.key for column in PROCESS_COLUMNS)

_DESCENDING_FIRST = frozenset({"memory", "sm", "cpu", "speed"})


def descending_first(key: str) -> bool:
    """Whether a sort by this column starts with the largest: so for figures, not for names."""
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
    """Whether every word is found in the pid, the user, the device or the command, whatever its case."""
    text = f"{row.pid} {row.user} {row.device_label} {row.command}".lower()
    return all(word in text for word in words.lower().split())


def arrange(rows: Sequence[ProcessSample], *, sort_key: str, descending: bool, words: str) -> tuple[ProcessSample, ...]:
    """The rows that match `words`, sorted; equal ones by pid, so that they don't jump about."""
    kept = sorted((row for row in rows if matches(row, words)), key=lambda row: (row.pid, row.device_label))
    return tuple(sorted(kept, key=_ORDER[sort_key], reverse=descending))


def identity(row: ProcessSample) -> tuple[int, float, str]:
    """What a row stays under between two ticks: a pid may come again, with another start time."""
    return (row.pid, row.start_time, row.device_id)


def nothing_there(devices: Sequence[DeviceSample]) -> str:
    """Why no process is shown: of CPU slices only the trainings that report themselves are known."""
    if devices and all(sample.device.kind == "cpu" for sample in devices):
        return "No training here reports itself (evener.report; in Keras Report(split))."
    return "No process is on these devices."


def process_lines(
    rows: Sequence[ProcessSample],
    width: int,
    height: int,
    marks: Marks,
    *,
    cursor: int,
    top: int,
    active: bool,
    sort_key: str,
    descending: bool,
    nothing: str = "",
    action: str = "",
) -> tuple[tuple[Line, ...], int]:
    """The heading and as many rows as fit in `height`, and the first row shown; an active table shows its cursor."""
    widths = column_widths(PROCESS_COLUMNS, PROCESS_GROWTH, {"command": 1000}, width - 1)
    head = heading(PROCESS_COLUMNS, widths, marks, sorted_by=sort_key, descending=descending, action=action)
    if not rows:
        return (head, Line((Span(f" {nothing}", "dim"),))), 0
    room = max(0, height - 1)
    first = window(len(rows), cursor, room, top)
    shown = rows[first : first + room]
    lines = tuple(
        table_row(PROCESS_COLUMNS, widths, row, marks, cursor=active and first + offset == cursor)
        for offset, row in enumerate(shown)
    )
    return (head, *lines), first
