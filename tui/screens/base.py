"""Base classes of the screens, the top bar, and the bar of keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

from evener.devices.types import Snapshot

from ..base_app import UsesApp
from ..view.cells import Line, Span, span_cells
from ..view.monitor import status_texts, top_line
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel, SortedPanel

NARROW = 100  # a terminal with fewer columns has stacked panels
LOW = 30  # a terminal with fewer lines has no frames
ALWAYS = 3  # keys at the end of the bar that are shown at any width
WHERE_WIDE = (  # actions whose keys are shown last, if there is room
    "next_sort",
    "common_scale",
    "toggle_scale",
    "change_span",
    "change_interval",
    "settings",
    "switch_theme",
)


class PanelScreen(UsesApp, Screen[None]):
    """Base class of the app's screens: a top bar, panels, and a bar of keys."""

    NAME = ""
    BLANK = True  # the panels cover the whole screen

    def compose(self) -> ComposeResult:
        """Yield the bars and the panels between them."""
        yield TopBar(self.NAME)
        yield from self.panels()
        yield KeysBar()

    def panels(self) -> Iterable[Widget]:
        """Yield the panels from top to bottom; subclasses implement it."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Redraw all panels; subclasses implement it."""
        raise NotImplementedError

    def fit_frames(self) -> int:
        """Hide panel frames in a small terminal, and return how many lines a frame takes: 0 or 2.

        Sets the CSS class `-bare` if the terminal has fewer than 100 columns or 30 lines, and
        `-narrow` if it has fewer than 100 columns.
        """
        width, height = self.app.size
        self.set_class(width < NARROW or height < LOW, "-bare")
        self.set_class(width < NARROW, "-narrow")
        return 0 if self.has_class("-bare") else 2

    def on_lines_resized(self, event: Lines.Resized) -> None:
        """Redraw the panels after the layout has resized one of them."""
        event.stop()
        self.call_after_refresh(self.redraw)

    def open_details(
        self, title: str, draw: Callable[[int], tuple[Line, ...]], *, wide: bool = False
    ) -> None:
        """Open a dialog that shows the lines returned by `draw`, which gets the width in cells."""
        from .dialogs import DetailsDialog

        self.app.push_screen(DetailsDialog(title, draw, wide=wide))

    async def on_screen_resume(self) -> None:
        """Draw the screen when the user comes back to it."""
        self.query_one(TopBar).redraw()
        self.redraw()


class SnapshotScreen(PanelScreen):
    """Base class of screens that show the latest reading of the devices and can be paused."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause(True)", "Pause"),
        Binding("p", "pause(False)", "Resume"),
        Binding("plus", "change_interval(-1)", "Read more often", show=False),
        Binding("minus", "change_interval(1)", "Read less often", show=False),
        Binding("r,f5", "refresh", "Redraw", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._paused_at: Snapshot | None = None
        self._placed: tuple[object, ...] = ()

    @property
    def shown(self) -> Snapshot | None:
        """The reading that the screen shows, or None before the first one.

        This is the latest reading or, while the screen is paused, the one from when it was paused.
        """
        return self._paused_at or self.evener.snapshot

    @property
    def state(self) -> str:
        """The word "paused" while the screen is paused, else ""."""
        return "paused" if self._paused_at is not None else ""

    def on_mount(self) -> None:
        """Focus the first list, and redraw at each new reading."""
        self.query_one(ListPanel).focus()
        self.watch(self.app, "snapshot", self._sampled, init=False)

    def _sampled(self) -> None:
        if self.is_current and self._paused_at is None:
            self.redraw()

    def place_panels(self, heights: Mapping[str, int]) -> None:
        """Set the heights of panels.

        `heights` maps the selector of a panel to its height in lines; 0 hides the panel.
        """
        # Setting heights lays out the screen again, so heights are set only if they have changed.
        placed = (self.app.size, heights)
        if self._placed == placed:
            return
        self._placed = placed
        for name, count in heights.items():
            panel = self.query_one(name)
            panel.display = count > 0
            panel.styles.height = count

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible. A paused screen can be resumed, but not paused."""
        return action != "pause" or parameters[0] is (self._paused_at is None)

    def action_pause(self, paused: bool) -> None:
        """Freeze the screen at the current reading, or show new readings again."""
        self._paused_at = self.evener.snapshot if paused else None
        self.refresh_bindings()
        self.redraw()

    def action_refresh(self) -> None:
        """Resume, and redraw the whole screen."""
        self.action_pause(False)
        self.refresh(layout=True)

    def action_change_interval(self, direction: int) -> None:
        """Read the devices less often (1) or more often (-1)."""
        self.evener.change_interval(direction)
        self.redraw()


class SortedScreen(PanelScreen):
    """Base class of screens with a table that the user can filter, sort, and mark rows in."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "end_filter", "End the filter", show=False),
    ]
    FILTERED = ""  # the columns in which the filter searches, for its placeholder

    def filter_field(self) -> Input:
        """Return the input field for filter words, which is hidden until the user opens it."""
        return Input(placeholder=f"words in {self.FILTERED}", id="filter", compact=True)

    @property
    def sorted_panel(self) -> SortedPanel[Any]:
        """The table that is filtered and sorted."""
        return self.query_one(SortedPanel)

    def action_filter(self) -> None:
        """Show and focus the filter."""
        field = self.query_one("#filter", Input)
        field.add_class("-open")
        field.focus()
        self.redraw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter the table by the words typed so far."""
        self.sorted_panel.filter_by(event.value)

    def on_input_submitted(self) -> None:
        """Return to the table, and keep it filtered."""
        self._close_filter()

    def action_end_filter(self) -> None:
        """Clear the filter, and unmark all rows."""
        self.query_one("#filter", Input).value = ""
        self.sorted_panel.untag()
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").remove_class("-open")
        self.sorted_panel.focus()
        self.redraw()


SCREENS = {"monitor": "Monitor", "balance": "Balance", "runs": "Runs", "trainings": "Trainings"}


class TopBar(Lines):
    """The first line of a screen: the names of all screens and the status of the devices.

    `open_screen` is the screen whose name is highlighted.
    """

    def __init__(self, open_screen: str) -> None:
        super().__init__(id="top")
        self.shown = open_screen

    def on_mount(self) -> None:
        """Redraw the line at each new reading."""
        self.watch(self.app, "snapshot", self._sampled, init=False)

    def _sampled(self) -> None:
        if self.screen.is_current:
            self.redraw()

    def redraw(self) -> None:
        """Draw the line, with the status of the devices and the time of the last reading."""
        app = self.evener
        right: tuple[str, ...] = ()
        if app.snapshot is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(app.snapshot.at_seconds))
            right = status_texts(app.snapshot, clock)
        self.show((top_line(SCREENS, self.shown, right, self.size.width),))


class KeysBar(Lines):
    """The last line of a screen: the keys that have an effect there. Clicking a key presses it."""

    def __init__(self) -> None:
        super().__init__(id="keys", classes="bar")

    def on_mount(self) -> None:
        """Redraw the line whenever the key bindings change."""
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.redraw())

    def redraw(self) -> None:
        """Draw as many keys as fit, the most important first."""
        active = [binding.binding for binding in self.screen.active_bindings.values()]
        by_action: dict[str, Binding] = {}
        more: dict[str, Binding] = {}
        for each in reversed(active):  # of several keys for one action, the first is shown
            if each.show:
                by_action[each.action] = each
            elif each.action.partition("(")[0].rpartition(".")[2] in WHERE_WIDE:
                more[each.action] = each
        hints = self._fit([self._hint(each) for each in by_action.values()][::-1])
        if len(hints) == len(by_action):
            hints = self._extend(hints, [self._hint(each) for each in more.values()][::-1])
        self.show([Line(tuple(span for hint in hints for span in hint))])

    def _hint(self, binding: Binding) -> tuple[Span, ...]:
        """Return a key and its description as spans that can be clicked."""
        action = f"app.simulate_key('{binding.key}')"
        key = Span(f" {self.app.get_key_display(binding)}", "key", action)
        return key, Span(f" {binding.description}", "text", action)

    def _fit(self, hints: list[tuple[Span, ...]]) -> list[tuple[Span, ...]]:
        """Remove key hints until the line fits, but never the last three."""
        width = self.size.width
        while len(hints) > ALWAYS and sum(map(span_cells, hints)) > width:
            del hints[-ALWAYS - 1]
        return hints

    def _extend(
        self, hints: list[tuple[Span, ...]], extra_hints: list[tuple[Span, ...]]
    ) -> list[tuple[Span, ...]]:
        """Insert extra key hints in front of the last three, as long as there is room."""
        left = self.size.width - sum(map(span_cells, hints))
        added = []
        for hint in extra_hints:
            left -= span_cells(hint)
            if left < 0:
                break
            added.append(hint)
        return [*hints[:-ALWAYS], *added, *hints[-ALWAYS:]]
