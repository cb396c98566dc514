"""A snapshot as text for a pipe or a terminal without the app, in colour only where it is asked for."""

from __future__ import annotations

from collections.abc import Iterable

from evener.devices.types import Snapshot
from evener.tui.view.cells import Line, Tone, clean
from evener.tui.view.devices import DeviceRow, device_lines
from evener.tui.view.marks import ASCII, Marks, to_ascii
from evener.tui.view.monitor import host_line
from evener.tui.view.processes import arrange, nothing_there, process_lines

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
    shown = arrange(snapshot.processes, sort_key="memory", descending=True, words="")
    devices, _ = device_lines(rows, width, len(rows) + 1, marks, -1, 0)
    processes, _ = process_lines(
        shown,
        width,
        len(shown) + 1,
        marks,
        cursor=-1,
        top=0,
        active=False,
        sort_key="",
        descending=True,
        nothing=nothing_there(snapshot.devices),
    )
    notes = [f"{marks.alarm} {clean(note)}" for note in snapshot.notes]
    if snapshot.driver:
        notes.insert(0, f"{clean(snapshot.host.hostname)}, NVIDIA driver {clean(snapshot.driver)}")
    parts = [host_line(snapshot, width, marks), *devices, Line(), *processes]
    return "\n".join((*_plain(notes, marks), *(_drawn(each, marks, colour) for each in parts))) + "\n"


def _plain(notes: Iterable[str], marks: Marks) -> list[str]:
    return [to_ascii(note) if marks is ASCII else note for note in notes]


def _drawn(line: Line, marks: Marks, colour: bool) -> str:
    if not colour:
        text = line.text.rstrip()
        return to_ascii(text) if marks is ASCII else text
    drawn = []
    for text, tone, _ in line.spans:
        shown = to_ascii(text) if marks is ASCII else text
        code = _CODES.get(tone)
        drawn.append(f"\x1b[{code}m{shown}\x1b[0m" if code and shown.strip() else shown)
    return "".join(drawn)
