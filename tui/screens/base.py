"""What the screens share: the bar on top, the keys below, and their panels between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

from evener.tui.runtime.base_app import UsesApp
from evener.tui.widgets.bars import KeysBar, TopBar, forget_drawn
from evener.tui.widgets.lines import Lines
from evener.tui.widgets.lists import SortedPanel

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


class SortedScreen(PanelScreen):
    """A screen with one sorted list and a field that filters it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "end_filter", "End the filter", show=False),
    ]
    FILTERED = ""  # what a filter looks at

    def filter_field(self) -> Input:
        """The field, hidden until it is asked for."""
        return Input(placeholder=f"words in {self.FILTERED}", id="filter", compact=True)

    @property
    def sorted_panel(self) -> SortedPanel[Any]:
        """The list."""
        return self.query_one(SortedPanel)

    def action_filter(self) -> None:
        """Ask for the words that rows must match."""
        field = self.query_one("#filter", Input)
        field.add_class("-open")
        field.focus()
        self.redraw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while typing."""
        self.sorted_panel.filter_by(event.value)

    def on_input_submitted(self) -> None:
        """Keep the filter and go to the list."""
        self._close_filter()

    def action_end_filter(self) -> None:
        """Remove the filter and all marks."""
        self.query_one("#filter", Input).value = ""
        self.sorted_panel.untag()
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").remove_class("-open")
        self.sorted_panel.focus()
        self.redraw()
