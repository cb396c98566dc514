"""A snapshot as text for a pipe or a terminal without the app, in colour where it is asked for."""

from __future__ import annotations

from evener.devices.types import Snapshot
from evener.tui.view.cells import Line, Tone, clean
from evener.tui.view.devices import DeviceRow, device_lines
from evener.tui.view.marks import Marks
from evener.tui.view.monitor import host_line
from evener.tui.view.processes import PROCESSES, nothing_there, process_rows
from evener.tui.view.table import Order, table_lines

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
    """Host, notes, devices and processes, every line at most `width` cells."""
    rows = [DeviceRow(sample) for sample in snapshot.devices]
    shown = process_rows(snapshot, Order("memory"))
    devices, _ = device_lines(rows, width, len(rows) + 1, marks)
    nothing = nothing_there(snapshot.devices)
    processes, _ = table_lines(PROCESSES, shown, width, len(shown) + 1, marks, nothing=nothing)
    notes = [f"{marks.alarm} {clean(note)}" for note in snapshot.notes]
    if snapshot.driver:
        notes.insert(0, f"{clean(snapshot.host.hostname)}, NVIDIA driver {clean(snapshot.driver)}")
    parts = [host_line(snapshot, width, marks), *devices, Line(), *processes]
    lines = (*(marks.show(note) for note in notes), *(_drawn(each, marks, colour) for each in parts))
    return "\n".join(lines) + "\n"


def _drawn(line: Line, marks: Marks, colour: bool) -> str:
    if not colour:
        return marks.show(line.text.rstrip())
    drawn = []
    for text, tone, _ in line.spans:
        shown = marks.show(text)
        code = _CODES.get(tone)
        drawn.append(f"\x1b[{code}m{shown}\x1b[0m" if code and shown.strip() else shown)
    return "".join(drawn)
