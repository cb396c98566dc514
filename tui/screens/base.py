"""The base classes of all screens.

A screen has a bar at the top, its own panels, and the keys at the bottom.
"""

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
    """A screen of the app; `NAME` is its Textual mode. It is redrawn when its size changes."""

    NAME = ""
    BLANK = True  # the panels cover the whole screen

    def compose(self) -> ComposeResult:
        """Yield the top bar, the screen's own panels, and the bar of keys."""
        yield TopBar(self.NAME)
        yield from self.panels()
        yield KeysBar()

    def panels(self) -> Iterable[Widget]:
        """Return the screen's own panels, from top to bottom."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Rebuild the lines of every panel."""
        raise NotImplementedError

    def fit_frames(self) -> int:
        """Give the panels frames if there is room, and stack them on a narrow terminal.

        Return the number of lines that a panel's frame takes: 2, or 0 without frames.
        """
        width, height = self.app.size
        self.set_class(width < NARROW or height < LOW, "-bare")
        self.set_class(width < NARROW, "-narrow")
        return 0 if self.has_class("-bare") else 2

    def on_lines_resized(self, event: Lines.Resized) -> None:
        """Redraw for the new size, once even if several panels changed their sizes."""
        event.stop()
        self.call_after_refresh(self.redraw)

    def open_details(
        self, title: str, draw: Callable[[int], tuple[Line, ...]], *, wide: bool = False
    ) -> None:
        """Open a page of text with this title over the screen.

        `draw(width)` returns the page's lines. `wide` makes the page wider than other dialogs. The
        modules of dialogs are imported when the first dialog opens.
        """
        from .dialogs import DetailsDialog

        self.app.push_screen(DetailsDialog(title, draw, wide=wide))

    async def on_screen_resume(self) -> None:
        """Redraw the screen when it is shown again, because hidden screens aren't redrawn."""
        self.query_one(TopBar).redraw()
        self.redraw()


class SnapshotScreen(PanelScreen):
    """A screen that is redrawn at each new snapshot until the user pauses it."""

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
        """The snapshot to draw: the newest or, while the screen is paused, that of the pause.

        It is None before the first snapshot.
        """
        return self._paused_at or self.evener.snapshot

    @property
    def state(self) -> str:
        """ "paused" while the screen is paused, else ""."""
        return "paused" if self._paused_at is not None else ""

    def on_mount(self) -> None:
        """Focus the list, and redraw at each new snapshot unless the screen is paused or hidden."""
        self.query_one(ListPanel).focus()
        self.watch(self.app, "snapshot", self._sampled, init=False)

    def _sampled(self) -> None:
        if self.is_current and self._paused_at is None:
            self.redraw()

    def place_panels(self, rows: Mapping[str, int]) -> None:
        """Set the height of each panel in lines, including its frame; 0 hides the panel.

        `rows` maps CSS selectors to heights.
        """
        # Setting heights lays out the screen again, so heights are set only if they have changed.
        placed = (self.app.size, rows)
        if self._placed == placed:
            return
        self._placed = placed
        for name, count in rows.items():
            panel = self.query_one(name)
            panel.display = count > 0
            panel.styles.height = count

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable "Pause" while the screen is updated, and "Resume" while it is paused."""
        return action != "pause" or parameters[0] is (self._paused_at is None)

    def action_pause(self, paused: bool) -> None:
        """Stop updating the screen if `paused`, else resume; sampling continues in either case."""
        self._paused_at = self.evener.snapshot if paused else None
        self.refresh_bindings()
        self.redraw()

    def action_refresh(self) -> None:
        """Resume updating the screen, and redraw everything."""
        self.action_pause(False)
        self.refresh(layout=True)

    def action_change_interval(self, direction: int) -> None:
        """Shorten (-1) or lengthen (1) the interval between readings."""
        self.evener.change_interval(direction)
        self.redraw()


class SortedScreen(PanelScreen):
    """A screen with one sorted list and a field for its filter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "end_filter", "End the filter", show=False),
    ]
    FILTERED = ""  # the columns in which the filter searches, for its placeholder

    def filter_field(self) -> Input:
        """Return a new field for the filter, which is hidden until the user opens it."""
        return Input(placeholder=f"words in {self.FILTERED}", id="filter", compact=True)

    @property
    def sorted_panel(self) -> SortedPanel[Any]:
        """The screen's sorted list."""
        return self.query_one(SortedPanel)

    def action_filter(self) -> None:
        """Open the filter's field; the list then shows only rows that contain its words."""
        field = self.query_one("#filter", Input)
        field.add_class("-open")
        field.focus()
        self.redraw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter the list while the user types."""
        self.sorted_panel.filter_by(event.value)

    def on_input_submitted(self) -> None:
        """Keep the filter, close its field, and focus the list."""
        self._close_filter()

    def action_end_filter(self) -> None:
        """Remove the filter and all marks, and focus the list."""
        self.query_one("#filter", Input).value = ""
        self.sorted_panel.untag()
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").remove_class("-open")
        self.sorted_panel.focus()
        self.redraw()


SCREENS = {"monitor": "Monitor", "balance": "Balance", "runs": "Runs", "trainings": "Trainings"}


class TopBar(Lines):
    """The line with the screens' names and their keys; a click on a name opens that screen."""

    def __init__(self, shown: str) -> None:
        super().__init__(id="top")
        self.shown = shown

    def on_mount(self) -> None:
        """Redraw at each new snapshot, because the line shows its time and host."""
        self.watch(self.app, "snapshot", self._sampled, init=False)

    def _sampled(self) -> None:
        if self.screen.is_current:
            self.redraw()

    def redraw(self) -> None:
        """Rebuild the line for the newest snapshot and the current width."""
        app = self.evener
        right: tuple[str, ...] = ()
        if app.snapshot is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(app.snapshot.at_seconds))
            right = status_texts(app.snapshot, clock)
        self.show((top_line(SCREENS, self.shown, right, self.size.width),))


class KeysBar(Lines):
    """The line with the keys that work now; clicking a key presses it.

    It replaces Textual's footer, which creates a widget for each key whenever the focus moves, and
    keeps a thousand of them in memory.
    """

    def __init__(self) -> None:
        super().__init__(id="keys", classes="bar")

    def on_mount(self) -> None:
        """Redraw when the key bindings change, for example because the focus has moved."""
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.redraw())

    def redraw(self) -> None:
        """Rebuild the line from the active key bindings."""
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
        """Return a key with its description; clicking either presses the key."""
        action = f"app.simulate_key('{binding.key}')"
        key = Span(f" {self.app.get_key_display(binding)}", "key", action)
        return key, Span(f" {binding.description}", "text", action)

    def _fit(self, hints: list[tuple[Span, ...]]) -> list[tuple[Span, ...]]:
        """Remove hints until they fit, but keep the last `ALWAYS`."""
        width = self.size.width
        while len(hints) > ALWAYS and sum(map(span_cells, hints)) > width:
            del hints[-ALWAYS - 1]
        return hints

    def _extend(
        self, hints: list[tuple[Span, ...]], more: list[tuple[Span, ...]]
    ) -> list[tuple[Span, ...]]:
        """Add hints that fit, before the last `ALWAYS`."""
        left = self.size.width - sum(map(span_cells, hints))
        added = []
        for hint in more:
            left -= span_cells(hint)
            if left < 0:
                break
            added.append(hint)
        return [*hints[:-ALWAYS], *added, *hints[-ALWAYS:]]
