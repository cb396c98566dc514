"""Everything about one device or process, kept up to date while it is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from textual.containers import VerticalScroll
from textual.widget import Widget

from evener.devices.types import Snapshot
from evener.tui.screens.dialogs import Dialog, Text
from evener.tui.view.cells import Line


class DetailsDialog(Dialog[None]):
    """Draws what `draw(snapshot, width)` gives for the newest snapshot."""

    def __init__(self, title: str, draw: Callable[[Snapshot, int], tuple[Line, ...]]) -> None:
        super().__init__()
        self.TITLE_TEXT = title
        self._draw = draw

    def content(self) -> Iterable[Widget]:
        """The facts, scrolled where they don't fit."""
        with VerticalScroll(id="scroll"):
            yield Text()

    def on_mount(self) -> None:
        """Follow the newest snapshot."""
        self.watch(self.app, "snapshot", self.redraw)

    def on_resize(self) -> None:
        """Wrap anew."""
        self.redraw()

    def redraw(self) -> None:
        """Work the facts out again."""
        snapshot = self.evener.snapshot
        if snapshot is not None:
            self.query_one(Text).show(self._draw(snapshot, self.scrolled_width))
