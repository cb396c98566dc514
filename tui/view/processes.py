"""The process table: what runs on the devices, sorted and filtered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample, ProcessSample, Reading, Snapshot, State

from ..text.formatting import plain
from .cells import Span, Tone, cut
from .charts import figure, run_time, short, short_bytes, whole
from .table import TAG, Column, Grid, text_cell

NO_TRAINING = "No training reports here. PyTorch: Split, evener.report; Keras: Report(split)."
Identity = tuple[int, float, str]  # pid, start, device: a pid may be reused, with another start


class ProcessRow(NamedTuple):
    """A row: the process, for how long it has run, whether it has gone."""

    sample: ProcessSample
    seconds: float | None = None
    ended: bool = False


def _figure(
    key: str,
    titles: tuple[str, ...],
    least: int,
    reading: Callable[[ProcessSample], Reading],
    draw: Callable[[float], str] = whole,
    tone: Tone = "text",
) -> Column[ProcessRow]:
    def cell(row: ProcessRow, width: int) -> tuple[Span, ...]:
        return (figure(reading(row.sample), width, rate if draw is short and width >= 9 else draw, tone),)

    return Column(key, titles, least, cell, value=lambda row: _sorted_by(reading(row.sample)))


def _sorted_by(reading: Reading) -> float:
    """The figure that a column is sorted by; what is unknown comes last."""
    return -1.0 if reading.value is None else reading.value


def _text(key: str, least: int, text: Callable[[ProcessSample], str]) -> Column[ProcessRow]:
    return Column(
        key, (key,), least, text_cell(lambda row: text(row.sample)), "left", lambda row: text(row.sample).lower()
    )


def _command(row: ProcessRow, width: int) -> tuple[Span, ...]:
    program, space, rest = plain(row.sample.command).partition(" ")
    program = f"ended: {program.rpartition('/')[2]}" if row.ended else program
    text = cut(program.rpartition("/")[2] + space + rest, width)
    return (Span(text, "dim" if row.ended else "text"),)


PROCESS_COLUMNS: tuple[Column[ProcessRow], ...] = (
    TAG,
    Column("pid", ("pid",), 7, text_cell(lambda row: str(row.sample.pid), "strong"), value=lambda row: row.sample.pid),
    _text("user", 8, lambda sample: sample.user),
    _text("device", 6, lambda sample: sample.device_label),
    _figure("memory", ("memory", "mem"), 7, lambda sample: sample.memory_bytes, short_bytes, "memory"),
    _figure("sm", ("SM %", "SM"), 5, lambda sample: sample.sm_percent, tone="accent"),
    _figure("cpu", ("CPU %", "CPU"), 6, lambda sample: sample.cpu_percent),
    _figure("speed", ("samples/s", "smp/s"), 6, lambda sample: sample.samples_per_second, short, "speed"),
    Column(
        "time",
        ("run time", "time"),
        6,
        text_cell(lambda row: run_time(row.seconds)),
        value=lambda row: row.seconds or 0,
    ),
    _text("command", 10, lambda sample: sample.command)._replace(draw=_command),
)
PROCESSES = Grid(PROCESS_COLUMNS, (("command", 16), ("speed", 9), ("time", 8), ("user", 12)), {"command": 1000})


def process_words(row: ProcessRow) -> str:
    """The words of a process that a filter looks at."""
    return f"{row.sample.pid} {row.sample.user} {row.sample.device_label} {row.sample.command}"


def identity(sample: ProcessSample) -> Identity:
    """The identity of a process between two ticks."""
    return (sample.pid, sample.start_time, f"{sample.host}/{sample.device_id}")


def process_rows(snapshot: Snapshot, ended: Sequence[ProcessSample] = ()) -> tuple[ProcessRow, ...]:
    """A row for each process; those that have `ended` since stand among them."""
    return tuple(
        ProcessRow(
            _as_old(each) if each in ended else each,
            snapshot.at_seconds - each.start_time if each.start_time else None,
            ended=each in ended,
        )
        for each in sorted((*snapshot.processes, *ended), key=identity)
    )


def _as_old(sample: ProcessSample) -> ProcessSample:
    """The row of a process that has gone, with its last figures as old ones."""
    fields = ("memory_bytes", "sm_percent", "cpu_percent", "samples_per_second")
    figures = {field: reading for field in fields if (reading := getattr(sample, field)).value is not None}
    old = {field: msgspec.structs.replace(reading, state=State.STALE) for field, reading in figures.items()}
    return msgspec.structs.replace(sample, **old)


def nothing_there(devices: Sequence[DeviceSample]) -> str:
    """The reason why no process is shown: on CPU slices only trainings that report themselves can be seen."""
    if devices and all(sample.device.on_cpu for sample in devices):
        return NO_TRAINING
    return "No process is on these devices."
