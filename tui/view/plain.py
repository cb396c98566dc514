"""A snapshot without the app: as text, in colour where it is asked for, and as a document for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from evener.devices.registry import name_maker
from evener.devices.types import Snapshot

from ..text.formatting import plain
from .cells import Line, Marks, Tone, text_lines
from .devices import DeviceRow, device_lines
from .monitor import host_line
from .processes import PROCESSES, nothing_there, process_rows
from .ranks import work_by_device
from .table import Order, table_lines

if TYPE_CHECKING:
    from .trainings import TrainingRow

_CODES: dict[Tone, str] = {
    "dim": "2",
    "title": "2",
    "strong": "1",
    "accent": "34",
    "memory": "35",
    "power": "33",
    "speed": "32",
    "good": "32",
    "warn": "33",
    "bad": "1;31",
    "track": "2",
}


def snapshot_text(snapshot: Snapshot, width: int, marks: Marks, *, colour: bool) -> str:
    """Host, notes, devices, processes and trainings, every line at most `width` cells."""
    work = work_by_device(snapshot)
    rows = [DeviceRow(each, work=work.get((each.device.host, each.device.id))) for each in snapshot.devices]
    shown = process_rows(snapshot, Order("memory"))
    devices, _ = device_lines(rows, width, len(rows) + 1, marks)
    nothing = nothing_there(snapshot.devices)
    processes, _ = table_lines(PROCESSES, shown, width, len(shown) + 1, marks, nothing=nothing)
    trainings = _training_parts(snapshot, width, marks)
    parts = [host_line(snapshot, width, marks), *devices, Line(), *processes, *trainings]
    lines = (*(marks.show(note) for note in _notes(snapshot, marks)), *(_drawn(each, marks, colour) for each in parts))
    return "\n".join(lines) + "\n"


def snapshot_document(snapshot: Snapshot) -> dict[str, object]:
    """The document of `--json`: the snapshot, with its reports joined as trainings."""
    document = msgspec.structs.asdict(snapshot) | {"trainings": _join(snapshot)}
    del document["reports"]
    return document


def _notes(snapshot: Snapshot, marks: Marks) -> Iterator[str]:
    """The host with its driver, if there is one, and what is to be known of the machine."""
    if snapshot.driver:
        maker = name_maker(sample.device for sample in snapshot.devices)
        yield f"{plain(snapshot.host.hostname)}, {maker} driver {plain(snapshot.driver)}"
    yield from (f"{marks.alarm} {plain(note)}" for note in snapshot.notes)


def _join(snapshot: Snapshot) -> tuple[TrainingRow, ...]:
    """The trainings; what joins them is imported if there are any."""
    if not snapshot.reports:
        return ()
    from .trainings import join_trainings

    return join_trainings(snapshot)


def _training_parts(snapshot: Snapshot, width: int, marks: Marks) -> Iterator[Line]:
    """The trainings, and below them the ranks of each with what holds it up."""
    rows = _join(snapshot)
    if not rows:
        return
    from .training_lines import rank_table, training_lines, training_table

    yield Line()
    yield from training_table(rows, width, len(rows) + 1, marks)[0]
    for row in [row for row in rows if row.training or len(row.ranks) > 1]:  # of others the table has it all
        yield Line()
        yield from text_lines(row.workload or row.framework, width, 1, "strong")
        yield from rank_table(row, width, len(row.ranks) + 1, marks)[0]
        yield from training_lines(row, snapshot.at_seconds, width, marks)


def _drawn(line: Line, marks: Marks, colour: bool) -> str:
    if not colour:
        return marks.show(line.text.rstrip())
    drawn = []
    for text, tone, _ in line.spans:
        shown = marks.show(text)
        code = _CODES.get(tone)
        drawn.append(f"\x1b[{code}m{shown}\x1b[0m" if code and shown.strip() else shown)
    return "".join(drawn)
