"""The Monitor screen: every device, the graphs of the chosen one, and what runs on them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from textual.widget import Widget

from evener.devices.process_signals import read_environment
from evener.devices.types import Snapshot

from ..view.cells import Line, Span, line
from ..view.details import device_details, environment_lines, process_details
from ..view.host_groups import HostRow
from ..view.monitor import arrange, host_line, note_line
from ..view.processes import identity
from ..widgets.lines import Lines
from ..widgets.monitor import DevicePanel, GraphPanel, ProcessPanel
from .base import SnapshotScreen, SortedScreen

_BARS = 3  # rows of the bar on top, the host and the keys


class MonitorScreen(SnapshotScreen, SortedScreen):
    """Every device, the graphs of the chosen one, and the processes."""

    NAME = "monitor"
    FILTERED = "pid, user, device or command"

    def __init__(self) -> None:
        super().__init__()
        self._placed: tuple[object, ...] = ()

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
        placed = (self.app.size, notes.display, filtering, devices)
        if placed == self._placed:
            return
        self._placed = placed
        width, height = self.app.size
        rows = arrange(width, height - _BARS - notes.display - filtering, devices)
        panels = ((DevicePanel, rows.devices), (GraphPanel, rows.graphs), (ProcessPanel, rows.processes))
        self.place_panels(rows.framed, *panels)

    def _draw_bars(self, snapshot: Snapshot) -> None:
        app, width = self.evener, self.app.size.width
        self.query_one("#host", Lines).show((host_line(snapshot, width, app.marks, self.state),))
        self.query_one("#notes", Lines).show((note_line(snapshot.notes, width, app.marks),))

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
        key = chosen.device.key

        def draw(width: int) -> tuple[Line, ...]:
            snapshot = self.evener.snapshot
            devices = snapshot.devices if snapshot is not None else ()
            return device_details(next((each for each in devices if each.device.key == key), chosen), width)

        self.open_details(chosen.device.label, draw)

    def action_open_process(self) -> None:
        """Show all details of the process under the cursor."""
        panel = self.query_one(ProcessPanel)
        chosen = panel.rows[panel.cursor]
        key = identity(chosen.sample)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(chosen.sample.start_time))

        def draw(width: int) -> tuple[Line, ...]:
            snapshot = self.evener.snapshot
            there = (*snapshot.processes, *snapshot.parents) if snapshot is not None else ()
            sample = next((each for each in there if identity(each) == key), None)
            ended = () if sample is not None else (line(Span(" This process is no longer on the device.", "warn")),)
            return (*ended, *process_details(sample or chosen.sample, started, width))

        self.open_details(f"Process {chosen.sample.pid}", draw)

    def action_environment(self) -> None:
        """Show the environment of the process under the cursor."""
        chosen = self.query_one(ProcessPanel).chosen
        if chosen is None:
            return
        title = f"Environment of process {chosen.sample.pid}"
        with self.evener.saying_faults():
            variables = read_environment(chosen.sample)
            self.open_details(title, lambda width: environment_lines(variables, width), wide=True)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the keys that have an effect now."""
        if action in ("signal", "environment"):
            panel = self.query(ProcessPanel)
            return bool(panel) and panel.first().count > 0 and not (action == "signal" and self.evener.readonly)
        return super().check_action(action, parameters)

    def action_signal(self) -> None:
        """Choose a signal for the marked processes, or for the one under the cursor."""
        from .signals import SignalDialog

        chosen = self.query_one(ProcessPanel).chosen_rows
        there = tuple(row.sample for row in chosen if not row.ended)
        if there:
            self.app.push_screen(SignalDialog(there))
        else:
            self.evener.say(f"Process {chosen[0].sample.pid} has ended.")
