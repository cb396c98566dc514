"""What the screens share: the bar on top, the keys below, and the way to the app."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget

from evener.tui.widgets.bars import TopBar
from evener.tui.widgets.keys import KeysBar, forget_drawn
from evener.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from evener.tui.app.app import EvenerApp


NARROW = 100  # columns of the terminal, below which panels stand one under another
LOW = 30  # rows, below which they go without frames


class PanelScreen(Screen[None]):
    """One of the app's screens; `NAME` is its mode, and panels are drawn again when their size changes."""

    NAME = ""

    @property
    def evener(self) -> EvenerApp:
        """The app, by its own type."""
        return cast("EvenerApp", self.app)

    def compose(self) -> ComposeResult:
        """The bar, the screen's own panels, the keys."""
        yield TopBar(self.NAME)
        yield from self.panels()
        yield KeysBar()

    def panels(self) -> Iterable[Widget]:
        """What stands between the bar and the keys."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Work every panel's lines out again."""
        raise NotImplementedError

    def settle_frames(self) -> None:
        """Panels have frames where there is room for them, and stand one under another where it is narrow."""
        width, height = self.app.size
        self.set_class(width < NARROW or height < LOW, "-bare")
        self.set_class(width < NARROW, "-narrow")

    def on_lines_resized(self, event: Lines.Resized) -> None:
        """Fill the new size, once for all panels that changed together."""
        event.stop()
        self.call_after_refresh(self.redraw)

    async def on_screen_resume(self) -> None:
        """Show what happened while another screen was in front, and let go of what that had drawn."""
        forget_drawn()
        self.redraw()
