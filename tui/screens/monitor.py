"""The Monitor screen: devices, their graphs, and the processes on them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from evener.devices.types import DeviceSample, ProcessSample, Snapshot
from evener.plan.file import Link

from ..view.cells import Line, Span, line
from ..view.devices import DEVICES, HostRow, PanelRow, device_rows, group_rows
from ..view.monitor import (
    PROCESSES,
    Identity,
    ProcessRow,
    alert_line,
    alert_lines,
    arrange,
    device_details,
    empty_process_text,
    host_line,
    identity,
    note_lines,
    process_details,
    process_rows,
    process_search_text,
)
from ..view.table import Grid, Order, Position
from ..view.teaching import NO_TRAINING
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel, SortedPanel
from ..widgets.timelines import TimelinePanel
from .base import SnapshotScreen, SortedScreen

_BARS = 3  # lines for the top bar, the host and the keys


class MonitorScreen(SnapshotScreen, SortedScreen):
    """The Monitor screen: a table of devices, their graphs over time, and a table of processes."""

    NAME = "monitor"
    FILTERED = "pid, user, device or command"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "alerts", "Alerts"),
        Binding("C", "columns", "Columns"),
        Binding("left", "step_time(-1)", "Earlier", show=False),
        Binding("right", "step_time(1)", "Later", show=False),
        Binding("shift+left", "step_time(-10)", "Ten steps earlier", show=False),
        Binding("shift+right", "step_time(10)", "Ten steps later", show=False),
        Binding("right_square_bracket", "change_span(1)", "Longer time in graphs", show=False),
        Binding("left_square_bracket", "change_span(-1)", "Shorter time in graphs", show=False),
        Binding("l", "common_scale", "One scale for all devices", show=False),
    ]

    def panels(self) -> Iterable[Widget]:
        """Yield the line about the host, warnings, devices, graphs, processes and the filter."""
        yield Lines(id="host", classes="bar")
        yield Lines(id="notes")
        yield DevicePanel()
        yield TimelinePanel()
        yield ProcessPanel()
        yield self.filter_field()

    def redraw(self) -> None:
        """Redraw the screen with its current reading; does nothing before the first reading."""
        snapshot = self.shown
        if snapshot is None:
            return
        with self.app.batch_update():
            devices = self.query_one(DevicePanel)
            devices.place(snapshot)
            self._place_panels(snapshot, devices.count)
            self._draw_bars(snapshot)
            self._draw_graphs()
            devices.has_graphs = self.query_one(TimelinePanel).shows_all
            devices.redraw()
            self.query_one(ProcessPanel).follow(snapshot)

    def _place_panels(self, snapshot: Snapshot, devices: int) -> None:
        notes = self.query_one("#notes", Lines)
        shown = self._notes(snapshot)
        notes.display = bool(shown)
        if notes.display and notes.outer_size.height != len(shown):
            notes.styles.height = len(shown)
        filtering = self.query_one("#filter").has_class("-open")
        width, height = self.app.size
        self.place_panels(
            arrange(
                width,
                height - _BARS - len(shown) - filtering,
                self.fit_frames(),
                devices,
                len(snapshot.processes),
            )
        )

    def _draw_bars(self, snapshot: Snapshot) -> None:
        width = self.app.size.width
        self.query_one("#host", Lines).show((host_line(snapshot, width, self.state),))
        self.query_one("#notes", Lines).show(self._notes(snapshot))

    def _notes(self, snapshot: Snapshot) -> tuple[Line, ...]:
        """Return the newest unread alert or, if there is none, the warnings about this machine."""
        app, width = self.evener, self.app.size.width
        if app.unread_alerts:
            return (alert_line(app.alerts[-1], app.unread_alerts, width),)
        return note_lines(snapshot.notes, width)

    def on_list_panel_moved(self) -> None:
        """Highlight the device under the cursor in the graphs."""
        self._draw_graphs()

    def _draw_graphs(self) -> None:
        devices, graphs = self.query_one(DevicePanel), self.query_one(TimelinePanel)
        snapshot = self.shown
        if snapshot is not None and graphs.display:
            graphs.set_data(snapshot.devices, devices.sample)

    def action_alerts(self) -> None:
        """Open the list of alerts, newest first, and mark them as read."""
        alerts = tuple(reversed(self.evener.alerts))
        self.evener.unread_alerts = 0
        self.open_details("Alerts", lambda width: alert_lines(alerts, width))
        self.redraw()

    def action_columns(self) -> None:
        """Open the dialog that chooses the columns of the device table."""
        from .column_dialog import ColumnDialog

        self.app.push_screen(ColumnDialog(), lambda _: self.redraw())

    def action_step_time(self, cells: int) -> None:
        """Move the time cursor of the graphs to the right by `cells`, which may be negative."""
        self.query_one(TimelinePanel).step(cells)

    def action_change_span(self, direction: int) -> None:
        """Show more time (1) or less time (-1) in the graphs."""
        self.query_one(TimelinePanel).change_span(direction)

    def action_common_scale(self) -> None:
        """Switch between one scale for all devices and a scale for each device."""
        self.query_one(TimelinePanel).toggle_scale()

    def action_end_filter(self) -> None:
        """Hide the time cursor if it is visible, and otherwise end the filter."""
        # In the filter's field, Escape always ends the filter.
        graphs = self.query_one(TimelinePanel)
        if graphs.cursor is not None and self.focused is not self.query_one("#filter"):
            graphs.hide_cursor()
        else:
            super().action_end_filter()

    def action_open_device(self) -> None:
        """Open details of the device under the cursor. On a host, show or hide its devices."""
        panel = self.query_one(DevicePanel)
        chosen = panel.rows[panel.cursor]
        if isinstance(chosen, HostRow):
            panel.folded ^= {chosen.host}
            self.redraw()
            return
        sample = chosen.sample
        from evener.balancer.store.links import list_links  # not needed by the first frame

        snapshot = self.evener.snapshot
        links: tuple[Link, ...] = ()
        if snapshot is not None:
            links = list_links([device.device for device in snapshot.devices], snapshot.driver)

        def draw(width: int) -> tuple[Line, ...]:
            return device_details(self._newest(sample), width, links)

        self.open_details(sample.device.label, draw)

    def _newest(self, sample: DeviceSample) -> DeviceSample:
        """Return the latest reading of the device in `sample`, or `sample` if there is none."""
        devices = self.evener.snapshot.devices if self.evener.snapshot is not None else ()
        return next(
            (device for device in devices if device.device.key == sample.device.key), sample
        )

    def action_open_process(self) -> None:
        """Open details of the process under the cursor."""
        panel = self.query_one(ProcessPanel)
        chosen = panel.rows[panel.cursor]
        key = identity(chosen.sample)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(chosen.sample.start_time))

        def draw(width: int) -> tuple[Line, ...]:
            snapshot = self.evener.snapshot
            there = snapshot.processes if snapshot is not None else ()
            sample = next((each for each in there if identity(each) == key), None)
            ended = (
                ()
                if sample is not None
                else (line(Span(" This process is no longer on the device.", "warn")),)
            )
            return (*ended, *process_details(sample or chosen.sample, started, width))

        self.open_details(f"Process {chosen.sample.pid}", draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible now.

        Signals can't be sent if the app is read-only or no process is listed.
        """
        if action == "signal":
            panel = self.query(ProcessPanel)
            return bool(panel) and panel.first().count > 0 and not self.evener.readonly
        return super().check_action(action, parameters)

    def action_signal(self) -> None:
        """Ask which signal to send to the marked processes, or to the one under the cursor."""
        from .dialogs import choose_signal

        chosen = self.query_one(ProcessPanel).chosen_rows
        there = tuple(row.sample for row in chosen if not row.ended)
        if there:
            choose_signal(self.evener, there)
        else:
            self.evener.show_message(f"Process {chosen[0].sample.pid} has ended.")


STAY_SECONDS = 4.0  # seconds that the row of an ended process stays


class DevicePanel(ListPanel[PanelRow]):
    """Table of the devices, grouped by host on a cluster."""

    OPEN = "screen.open_device"

    def __init__(self) -> None:
        super().__init__("Devices", id="devices")
        self.folded: frozenset[str] = frozenset()  # hosts whose devices are hidden
        self.has_graphs = False  # True if every device has graphs, which replace its history

    @property
    def position(self) -> Position:
        """The cursor and the first visible row. The cursor is drawn even without focus."""
        return Position(self.cursor, self.top)

    @property
    def sample(self) -> DeviceSample | None:
        """The reading of the device under the cursor, or None if there are no devices.

        On a host's row, this is the reading of its first device.
        """
        row = self.chosen.rows[0] if isinstance(self.chosen, HostRow) else self.chosen
        return row.sample if row is not None else None

    def place(self, snapshot: Snapshot) -> None:
        """Fill the table with a new reading."""
        publisher = self.evener.publisher
        self.place_rows(
            group_rows(
                device_rows(snapshot, publisher.history, self.evener.alert_watch.reported),
                self.folded,
            )
        )
        self.entitle(subtitle=f"read every {publisher.interval_seconds:g} s")

    def grid(self) -> Grid[PanelRow]:
        """Return the definitions of the columns that the user hasn't hidden."""
        hidden = {*self.evener.settings.hidden_columns}
        if self.has_graphs:
            hidden.add("history")
        if not hidden:
            return DEVICES
        return DEVICES._replace(
            columns=tuple(column for column in DEVICES.columns if column.key not in hidden)
        )


class ProcessPanel(SortedPanel[ProcessRow]):
    """Table of the processes on the devices. Processes that have ended stay for four seconds."""

    COLUMNS = PROCESSES.columns
    OPEN = "screen.open_process"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("K,f9", "screen.signal", "Signal"),
    ]

    def __init__(self) -> None:
        super().__init__("Processes", id="processes", order=Order("memory"))
        self._nothing = NO_TRAINING
        # each process with the time when it was last seen, in Unix seconds
        self._seen: dict[Identity, tuple[ProcessSample, float]] = {}

    def identity(self, row: ProcessRow) -> Identity:
        """Return the pid, start time and device of the row's process."""
        return identity(row.sample)

    def search_text_of(self, row: ProcessRow) -> str:
        """Return the text that the filter searches."""
        return process_search_text(row)

    def follow(self, snapshot: Snapshot) -> None:
        """Set the rows: the processes in a reading, and those that have just ended."""
        now = snapshot.at_seconds
        kept = {
            key: (each, at)
            for key, (each, at) in self._seen.items()
            if 0 <= now - at <= STAY_SECONDS
        }
        self._seen = kept | {identity(process): (process, now) for process in snapshot.processes}
        self._nothing = empty_process_text(snapshot.devices)
        self.set_data(
            process_rows(snapshot, [each for each, at in self._seen.values() if at != now])
        )

    def grid(self) -> Grid[ProcessRow]:
        """Return the column definitions, and the text to show if the table is empty."""
        return PROCESSES._replace(
            nothing="No process matches the filter." if self.words else self._nothing
        )
