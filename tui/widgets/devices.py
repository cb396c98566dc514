"""The panel of devices, and the graphs of the one under its cursor."""

from __future__ import annotations

from evener.devices.types import DeviceSample, Snapshot
from evener.tui.view.devices import device_lines
from evener.tui.view.monitor import device_caption, device_rows, graph_lines
from evener.tui.view.table import Position
from evener.tui.widgets.lines import Lines
from evener.tui.widgets.lists import ListPanel


class DevicePanel(ListPanel):
    """One row per device."""

    def __init__(self) -> None:
        super().__init__("Devices", id="devices")
        self.snapshot: Snapshot | None = None

    @property
    def count(self) -> int:
        """How many devices there are."""
        return len(self.snapshot.devices) if self.snapshot is not None else 0

    @property
    def chosen(self) -> DeviceSample | None:
        """The device under the cursor."""
        return self.snapshot.devices[self.cursor] if self.snapshot is not None and self.count else None

    def take(self, snapshot: Snapshot) -> None:
        """Show this snapshot."""
        self.snapshot = snapshot
        self.cursor = max(0, min(self.cursor, self.count - 1))
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the rows."""
        if self.snapshot is None:
            return
        app = self.evener
        rows = device_rows(self.snapshot, app.publisher.history)
        lines, self.top = device_lines(rows, *self.size, app.marks, Position(self.cursor, self.top))
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
        self.entitle(device_caption(sample))
        history, marks = self.evener.publisher.history, self.evener.marks
        self.show(graph_lines(sample, history, *self.size, marks))
