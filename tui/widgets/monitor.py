"""The Monitor screen's panels: devices, the graphs of the one under the cursor, processes as a list or a tree."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from evener.devices.types import DeviceSample, ProcessSample, Snapshot

from ..view.devices import device_lines, short_name
from ..view.host_groups import HostRow, PanelRow, group_rows
from ..view.monitor import graph_lines, panel_rows
from ..view.processes import PROCESSES, Identity, ProcessRow, identity, nothing_there, process_rows
from ..view.ranks import work_by_device
from ..view.table import Order, Position
from .lines import Lines
from .lists import ListPanel, SortedPanel

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
        self.rows = self.group(snapshot)
        self.cursor = max(0, min(self.cursor, self.count - 1))
        self.redraw()

    def fold(self, host: str) -> None:
        """Hide the host's devices, or show them again."""
        self.folded ^= {host}

    def redraw(self) -> None:
        """Rebuild the rows."""
        app = self.evener
        work = work_by_device(self.snapshot) if self.snapshot is not None else {}
        rows = panel_rows(self.rows, app.publisher.history, work)
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
        self.entitle(f"{sample.device.label} {short_name(sample.device.name)}")
        history, marks = self.evener.publisher.history, self.evener.marks
        self.show(graph_lines(sample, history, *self.size, marks))


class ProcessPanel(SortedPanel[ProcessRow]):
    """A panel with a row per process on a device; as a tree also what started them."""

    COLUMNS = PROCESSES.columns
    OPEN = "screen.open_process"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "tree", "Tree"),
        Binding("e", "screen.environment", "Env"),
        Binding("K,f9", "screen.signal", "Signal"),
    ]

    def __init__(self) -> None:
        super().__init__("Processes", id="processes", order=Order("memory"))
        self.snapshot: Snapshot | None = None
        self._seen: dict[Identity, tuple[ProcessSample, float]] = {}  # and when last
        self.as_tree = False

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
        rows = process_rows(self.snapshot, self.order, self.words, tree=self.as_tree, ended=ended)
        nothing = "No process matches the filter." if self.words else nothing_there(self.snapshot.devices)
        self.show_rows(PROCESSES, rows, len(self.snapshot.processes), nothing)

    def action_tree(self) -> None:
        """Show processes under what started them, or in one list."""
        self.as_tree = not self.as_tree
        self.redraw()
