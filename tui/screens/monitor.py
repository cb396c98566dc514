"""The Monitor screen and its panels: every device, the graphs of the chosen one, and what runs on them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from evener.devices.types import DeviceSample, ProcessSample, Snapshot

from ..view.cells import Line, Span, line
from ..view.devices import HostRow, PanelRow, device_lines, group_rows, short_name
from ..view.monitor import (
    arrange,
    device_details,
    graph_lines,
    host_line,
    note_line,
    panel_rows,
    process_details,
)
from ..view.processes import PROCESSES, Identity, ProcessRow, identity, nothing_there, process_rows
from ..view.ranks import work_by_device
from ..view.table import Order, Position
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel, SortedPanel
from .base import SnapshotScreen, SortedScreen

_BARS = 3  # rows of the bar on top, the host and the keys


class MonitorScreen(SnapshotScreen, SortedScreen):
    """Every device, the graphs of the chosen one, and the processes."""

    NAME = "monitor"
    FILTERED = "pid, user, device or command"

    def panels(self) -> Iterable[Widget]:
        """Host, notes, devices, graphs, processes, filter."""
        yield Lines(id="host", classes="bar")
        yield Lines(id="notes")
        yield DevicePanel()
        yield GraphPanel()
        yield ProcessPanel()
        yield self.filter_field()

    def redraw(self) -> None:
        """Draw the newest snapshot, or the one at which it was paused, in every panel."""
        snapshot = self.shown
        if snapshot is None:
            return
        with self.app.batch_update():
            devices = self.query_one(DevicePanel)
            self._place_panels(snapshot, len(devices.group(snapshot)))
            self._draw_bars(snapshot)
            devices.take(snapshot)
            self.query_one(GraphPanel).take(devices.sample)
            self.query_one(ProcessPanel).take(snapshot)

    def _place_panels(self, snapshot: Snapshot, devices: int) -> None:
        notes = self.query_one("#notes", Lines)
        notes.display = bool(snapshot.notes)
        filtering = self.query_one("#filter").has_class("-open")
        width, height = self.app.size
        rows = arrange(width, height - _BARS - notes.display - filtering, devices)
        panels = ((DevicePanel, rows.devices), (GraphPanel, rows.graphs), (ProcessPanel, rows.processes))
        self.place_panels(rows.framed, *panels)

    def _draw_bars(self, snapshot: Snapshot) -> None:
        width = self.app.size.width
        self.query_one("#host", Lines).show((host_line(snapshot, width, self.state),))
        self.query_one("#notes", Lines).show((note_line(snapshot.notes, width),))

    def on_list_panel_moved(self) -> None:
        """The graphs follow the device under the cursor."""
        self.query_one(GraphPanel).take(self.query_one(DevicePanel).sample)

    def action_open_device(self) -> None:
        """Show all details of the device under the cursor, or fold the host there."""
        panel = self.query_one(DevicePanel)
        chosen = panel.rows[panel.cursor]
        if isinstance(chosen, HostRow):
            panel.fold(chosen.host)
            self.redraw()
            return
        self.open_details(chosen.device.label, lambda width: device_details(self._newest(chosen), width))

    def _newest(self, sample: DeviceSample) -> DeviceSample:
        """The newest reading of a device; the one given if it isn't there any more."""
        devices = self.evener.snapshot.devices if self.evener.snapshot is not None else ()
        return next((each for each in devices if each.device.key == sample.device.key), sample)

    def action_open_process(self) -> None:
        """Show all details of the process under the cursor."""
        panel = self.query_one(ProcessPanel)
        chosen = panel.rows[panel.cursor]
        key = identity(chosen.sample)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(chosen.sample.start_time))

        def draw(width: int) -> tuple[Line, ...]:
            snapshot = self.evener.snapshot
            there = snapshot.processes if snapshot is not None else ()
            sample = next((each for each in there if identity(each) == key), None)
            ended = () if sample is not None else (line(Span(" This process is no longer on the device.", "warn")),)
            return (*ended, *process_details(sample or chosen.sample, started, width))

        self.open_details(f"Process {chosen.sample.pid}", draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the keys that have an effect now."""
        if action == "signal":
            panel = self.query(ProcessPanel)
            return bool(panel) and panel.first().count > 0 and not self.evener.readonly
        return super().check_action(action, parameters)

    def action_signal(self) -> None:
        """Choose a signal for the marked processes, or for the one under the cursor."""
        from .dialogs import SignalDialog

        chosen = self.query_one(ProcessPanel).chosen_rows
        there = tuple(row.sample for row in chosen if not row.ended)
        if there:
            self.app.push_screen(SignalDialog(there))
        else:
            self.evener.say(f"Process {chosen[0].sample.pid} has ended.")


STAY_SECONDS = 4.0  # for which a process that has ended keeps its row


class DevicePanel(ListPanel[PanelRow]):
    """A panel with a row per device; those of a cluster below their hosts."""

    OPEN = "screen.open_device"

    def __init__(self) -> None:
        super().__init__("Devices", id="devices")
        self.snapshot: Snapshot | None = None
        self.folded: frozenset[str] = frozenset()  # hosts whose devices are hidden

    @property
    def sample(self) -> DeviceSample | None:
        """The device under the cursor, or the first of the host there."""
        row = self.chosen
        return row.samples[0] if isinstance(row, HostRow) else row

    def group(self, snapshot: Snapshot) -> tuple[PanelRow, ...]:
        """The rows that it makes of a snapshot."""
        return group_rows(snapshot.devices, self.folded)

    def take(self, snapshot: Snapshot) -> None:
        """Show its devices."""
        self.snapshot = snapshot
        self.place_rows(self.group(snapshot))
        self.redraw()

    def fold(self, host: str) -> None:
        """Hide the host's devices, or show them again."""
        self.folded ^= {host}

    def redraw(self) -> None:
        """Rebuild the rows."""
        app = self.evener
        work = work_by_device(self.snapshot) if self.snapshot is not None else {}
        rows = panel_rows(self.rows, app.publisher.history, work)
        lines, self.top = device_lines(rows, *self.size, Position(self.cursor, self.top))
        self.entitle(subtitle=f"every {app.publisher.interval_seconds:g} s")
        self.show(lines)


class GraphPanel(Lines):
    """The last minutes of one device."""

    def __init__(self) -> None:
        super().__init__(id="graphs", classes="panel")

    def take(self, sample: DeviceSample | None) -> None:
        """Show this device."""
        if sample is None or not self.display:
            return
        self.entitle(f"{sample.device.label} {short_name(sample.device.name)}")
        self.show(graph_lines(sample, self.evener.publisher.history, *self.size))


class ProcessPanel(SortedPanel[ProcessRow]):
    """A panel with a row per process on a device."""

    COLUMNS = PROCESSES.columns
    OPEN = "screen.open_process"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("K,f9", "screen.signal", "Signal"),
    ]

    def __init__(self) -> None:
        super().__init__("Processes", id="processes", order=Order("memory"))
        self.snapshot: Snapshot | None = None
        self._seen: dict[Identity, tuple[ProcessSample, float]] = {}  # and when last

    def identity(self, row: ProcessRow) -> Identity:
        """The process."""
        return identity(row.sample)

    def take(self, snapshot: Snapshot) -> None:
        """Show this snapshot, and for a moment the processes that it doesn't have any more."""
        self.snapshot, now = snapshot, snapshot.at_seconds
        kept = {key: (each, at) for key, (each, at) in self._seen.items() if 0 <= now - at <= STAY_SECONDS}
        self._seen = kept | {identity(each): (each, now) for each in snapshot.processes}
        self.redraw()

    def redraw(self) -> None:
        """Sort, filter, and rebuild the rows."""
        if self.snapshot is None:
            return
        ended = [each for each, at in self._seen.values() if at != self.snapshot.at_seconds]
        rows = process_rows(self.snapshot, self.order, self.words, ended=ended)
        nothing = "No process matches the filter." if self.words else nothing_there(self.snapshot.devices)
        self.show_rows(PROCESSES, rows, len(self.snapshot.processes), nothing)
