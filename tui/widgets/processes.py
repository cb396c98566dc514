"""The panel of processes: sorted, filtered, with a cursor that stays on its process as rows move."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from evener.devices.types import ProcessSample, Snapshot
from evener.tui.view.processes import (
    SORT_KEYS,
    Order,
    arrange,
    descending_first,
    identity,
    nothing_there,
    process_lines,
)
from evener.tui.widgets.lists import ListPanel


class ProcessPanel(ListPanel):
    """One row per process on a device."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s,f6", "next_sort", "Sort"),
        Binding("S", "reverse", "Reverse", show=False),
    ]

    def __init__(self) -> None:
        super().__init__("Processes", id="processes")
        self.snapshot: Snapshot | None = None
        self.rows: tuple[ProcessSample, ...] = ()
        self.sort_key = "memory"
        self.descending = True
        self.words = ""
        self._under_cursor: tuple[int, float, str] | None = None

    @property
    def count(self) -> int:
        """How many processes match the filter."""
        return len(self.rows)

    @property
    def chosen(self) -> ProcessSample | None:
        """The process under the cursor."""
        return self.rows[self.cursor] if self.rows else None

    def take(self, snapshot: Snapshot) -> None:
        """Show this snapshot."""
        self.snapshot = snapshot
        self.redraw()

    def redraw(self) -> None:
        """Sort, filter, and rebuild the rows."""
        if self.snapshot is None:
            return
        order = Order(self.sort_key, self.descending, "screen.sort('{}')")
        self.rows = arrange(self.snapshot.processes, order, self.words)
        self._follow_process()
        nothing = "No process matches the filter." if self.words else nothing_there(self.snapshot.devices)
        marks, position = self.evener.marks, self.position
        lines, self.top = process_lines(self.rows, *self.size, marks, position, order, nothing)
        total = len(self.snapshot.processes)
        self.entitle(subtitle=f"{self.count} of {total} match: {self.words}" if self.words else f"{total}")
        self.show(lines)

    def _follow_process(self) -> None:
        keys = [identity(row) for row in self.rows]
        if self._under_cursor in keys:
            self.cursor = keys.index(self._under_cursor)
        else:
            self.cursor = max(0, min(self.cursor, len(keys) - 1))
            self.cursor_moved()

    def cursor_moved(self) -> None:
        """Remember the process, not the row."""
        chosen = self.chosen
        self._under_cursor = identity(chosen) if chosen is not None else None

    def action_next_sort(self) -> None:
        """Sort by the next column."""
        place = SORT_KEYS.index(self.sort_key)
        self.sort_by(SORT_KEYS[(place + 1) % len(SORT_KEYS)])

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.descending = not self.descending
        self.redraw()

    def sort_by(self, key: str) -> None:
        """Sort by a column; the same column again reverses the order."""
        self.descending = not self.descending if key == self.sort_key else descending_first(key)
        self.sort_key = key
        self.redraw()

    def filter_by(self, words: str) -> None:
        """Keep the processes that match every word."""
        self.words = words
        self.redraw()
