"""What the screens share: the bar on top, the keys below, and their panels between them."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget

from evener.tui.runtime.base_app import UsesApp
from evener.tui.widgets.bars import KeysBar, TopBar, forget_drawn
from evener.tui.widgets.lines import Lines

NARROW = 100  # columns of the terminal, below which panels are stacked
LOW = 30  # rows, below which they have no frames


class PanelScreen(UsesApp, Screen[None]):
    """One of the app's screens; `NAME` is its mode, and panels are redrawn when their size changes."""

    NAME = ""

    def compose(self) -> ComposeResult:
        """The bar, the screen's own panels, the keys."""
        yield TopBar(self.NAME)
        yield from self.panels()
        yield KeysBar()

    def panels(self) -> Iterable[Widget]:
        """What is between the bar and the keys."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Rebuild every panel's lines."""
        raise NotImplementedError

    def settle_frames(self) -> None:
        """Give the panels frames where there is room, and stack them where it is narrow."""
        width, height = self.app.size
        self.set_class(width < NARROW or height < LOW, "-bare")
        self.set_class(width < NARROW, "-narrow")

    def on_lines_resized(self, event: Lines.Resized) -> None:
        """Fill the new size, once for all panels that changed together."""
        event.stop()
        self.call_after_refresh(self.redraw)

    async def on_screen_resume(self) -> None:
        """Show what happened while another screen was in front."""
        forget_drawn()
        self.redraw()
