"""The panel of processes: sorted and filtered, or as a tree."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from evener.devices.types import Snapshot
from evener.tui.view.processes import (
    PROCESS_COLUMNS,
    PROCESSES,
    Identity,
    ProcessRow,
    identity,
    nothing_there,
    process_rows,
)
from evener.tui.view.table import Order
from evener.tui.widgets.lists import SortedPanel


class ProcessPanel(SortedPanel[ProcessRow]):
    """One row per process on a device; as a tree also what started them."""

    COLUMNS = PROCESS_COLUMNS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "tree", "Tree"),
        Binding("e", "screen.environment", "Env"),
        Binding("K,f9", "screen.signal", "Signal"),
    ]

    def __init__(self) -> None:
        super().__init__("Processes", id="processes", order=Order("memory"))
        self.snapshot: Snapshot | None = None
        self.as_tree = False

    def identity(self, row: ProcessRow) -> Identity:
        """The process."""
        return identity(row.sample)

    def take(self, snapshot: Snapshot) -> None:
        """Show this snapshot."""
        self.snapshot = snapshot
        self.redraw()

    def redraw(self) -> None:
        """Sort, filter, and rebuild the rows."""
        if self.snapshot is None:
            return
        rows = process_rows(self.snapshot, self.order, self.words, tree=self.as_tree)
        nothing = "No process matches the filter." if self.words else nothing_there(self.snapshot.devices)
        self.show_rows(PROCESSES, rows, len(self.snapshot.processes), nothing)

    def action_tree(self) -> None:
        """Show processes under what started them, or in one list."""
        self.as_tree = not self.as_tree
        self.redraw()
